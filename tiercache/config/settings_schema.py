"""The settings as JSON Schema, made from their table: for editors of the TOML file, and for the Helm chart.

python -m tiercache.config.settings_schema                        print the schema of a settings file
python -m tiercache.config.settings_schema values.schema.json     write the settings into the chart's schema
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tiercache.config.settings import SETTINGS

OF_THE_CHART = {
    "run_dir": "runDir",
    "arena": "arena",
    "grace": "grace",
    "nvme": "nvme.paths",
    "nvme_size": "nvme.size",
    "nvme_key": "nvme.keySecret",
    "group": "socketGroup",
    "listen": "listen.port",
    "curve_keys": "listen.serverKeySecret",
    "shared": "shared.existingSecret, shared.url",
    "shared_key": "shared.existingSecret",
    "shared_plain": "shared.plain",
    "shared_deployment": "shared.deployment",
    "shared_lookup_timeout": "shared.lookupTimeout",
    "shared_state": "shared.statePath",
    "http": "http.port",
    "http_allow_remote": "http.enabled",
}
"""Settings that have their own values in the chart, because volumes, secrets, ports or limits go with them."""


def settings_schema() -> dict[str, Any]:
    """JSON Schema (draft 7) of a settings file."""
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Settings of the tiercache daemon",
        "type": "object",
        "additionalProperties": False,
        "properties": {key: {"description": one.doc, **one.kind.schema} for key, one in SETTINGS.items()},
    }


def chart_settings() -> dict[str, Any]:
    """JSON Schema of the chart's `settings`."""
    properties = {key: one for key, one in settings_schema()["properties"].items() if key not in OF_THE_CHART}
    for key in ("quota", "nvme_quota"):  # may also be a table: the template makes a line of it
        size = {"type": ["string", "integer"], "pattern": SETTINGS["record_max"].kind.schema["pattern"]}
        properties[key] = {**properties[key], "type": ["string", "object"], "additionalProperties": size}
    return {
        "type": "object",
        "description": "Settings of the daemon by their keys. Not here, since the chart has values for them: "
        + ", ".join(f"{key} ({value})" for key, value in OF_THE_CHART.items())
        + ".",
        "additionalProperties": False,
        "properties": properties,
    }


def written_into(text: str) -> str:
    """The chart's schema with its settings part generated again."""
    schema = json.loads(text)
    schema["properties"]["settings"] = chart_settings()
    for path, key in (
        ("arena", "arena"),
        ("grace", "grace"),
        ("nvme.size", "nvme_size"),
        ("shared.lookupTimeout", "shared_lookup_timeout"),
    ):
        *outer, name = path.split(".")
        place = schema["properties"]
        for folder in outer:
            place = place[folder]["properties"]
        place[name] = {"description": SETTINGS[key].doc, **SETTINGS[key].kind.schema}
    return json.dumps(schema, indent=2) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """See the head of this module."""
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments:
        print(json.dumps(settings_schema(), indent=2))
    for name in arguments:
        path = Path(name)
        path.write_text(written_into(path.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
