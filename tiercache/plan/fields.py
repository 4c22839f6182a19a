"""A config.json whose errors name the field that is missing or wrong."""

from __future__ import annotations

from typing import Any

from tiercache.errors import ConfigError

DTYPE_BYTES = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2}


class Fields:
    """The fields of a model's configuration."""

    def __init__(self, name: str, values: dict[str, Any]) -> None:
        self._name = name
        self._values = values

    def get(self, key: str, default: Any = None) -> Any:
        value = self._values.get(key)
        return default if value is None else value

    def number(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if value is None:
            raise self.wrong(f"its configuration has no {key}: give the config.json of a decoder for transformers")
        least = 1 if default is None else 0
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.wrong(f"{key} is {value!r}, no whole number from {least} on: correct its configuration")
        return value

    def numbers(self, key: str) -> list[int]:
        """A list of whole numbers; empty if there is none."""
        values = self.get(key, [])
        if not isinstance(values, list) or not all(type(value) is int for value in values):
            raise self.wrong(f"{key} is {values!r}, no list of whole numbers: correct its configuration")
        return values

    def dtype_bytes(self) -> int:
        """Bytes of a weight that is not quantised."""
        key = "dtype" if self.get("dtype") else "torch_dtype"
        return self.bytes_of(key, 2)

    def bytes_of(self, key: str, default: int) -> int:
        """Bytes of an element of the type that a field names."""
        dtype = self.get(key)
        if dtype is None:
            return default
        plain = str(dtype).removeprefix("torch.")
        if plain not in DTYPE_BYTES:
            raise self.wrong(f"{key} is {plain}: known are {', '.join(DTYPE_BYTES)}")
        return DTYPE_BYTES[plain]

    def wrong(self, text: str) -> ConfigError:
        return ConfigError(f"{self._name}: {text}")
