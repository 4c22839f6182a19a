"""The settings of a server: one frozen object, checked when it is created. Loads neither torch nor uvicorn."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from tiercache.config.setting_kinds import hosts_problem
from tiercache.engine.settings import MAX_WAITING, STALL_TIMEOUT_S
from tiercache.errors import ConfigError
from tiercache.ground.units import parse_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """Settings of a server; those of its engine are `EngineSettings`. Raises ConfigError.

    Attributes:
        model: a Hugging Face decoder folder.
        host, port: where it listens; port 0 is any that is free.
        served_model_name: what clients call the model; the name of its folder if empty.
        allowed_hosts: further names that requests may be for, with commas between them, such as a proxy's. Without any,
            an address of this host is only asked as localhost, 127.0.0.1, [::1] or itself.
        api_key: what clients must send, if not empty.
        chat_template: a file with a Jinja template that stands in for the model's own.
        max_queued_requests: prompts that may wait for their first token; one more is refused with 429.
        grace_s: on SIGTERM, how long running requests may take; then they fail.
        stall_timeout_s: when the engine has not advanced for this time, its requests fail and `/health` says so.
        daemon: run directory of a daemon that runs; None starts a private one.
        cache: False is without a daemon.
        arena: size of a private daemon's DRAM tier.
        nvme: its directories on local disks, separated by commas.
        nvme_size: what they may take.
    """

    model: Path
    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str = ""
    allowed_hosts: str = ""
    api_key: str = ""
    chat_template: Path | None = None
    max_queued_requests: int = MAX_WAITING
    grace_s: float = 30.0
    stall_timeout_s: float = STALL_TIMEOUT_S
    daemon: Path | None = None
    cache: bool = True
    arena: str = "1GiB"
    nvme: str = ""
    nvme_size: str = ""

    def __post_init__(self) -> None:
        if not self.model.is_dir():
            raise ConfigError(f"{self.model} is not a folder: give that of a Hugging Face model, nothing is downloaded")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}: must be 0 (any) to 65535")
        if problem := hosts_problem(self.allowed_hosts):
            raise ConfigError(f"allowed_hosts is {self.allowed_hosts}: {problem}")
        if self.max_queued_requests < 1:
            raise ConfigError(f"max_queued_requests is {self.max_queued_requests}: must be at least 1")
        if not 0 <= self.grace_s < math.inf:
            raise ConfigError(f"grace is {self.grace_s}: must be 0 or more seconds")
        if not self.stall_timeout_s > 0:
            raise ConfigError(f"stall_timeout is {self.stall_timeout_s}: must be above 0 seconds")
        if self.daemon is not None and not self.cache:
            raise ConfigError("daemon and no-cache contradict each other: give one of them")
        if self.nvme and (self.daemon is not None or not self.cache):
            raise ConfigError("nvme is for a private daemon: leave it out, or daemon and no-cache")
        if self.nvme_size and not self.nvme:
            raise ConfigError(f"nvme_size is {self.nvme_size} and there is no nvme directory: give nvme too")
        for name in ("arena", "nvme_size"):
            self._check_size(name, getattr(self, name))

    @staticmethod
    def _check_size(name: str, size: str) -> None:
        try:
            if size:
                parse_bytes(size)
        except ValueError as error:
            raise ConfigError(f"{name}: {error}") from None

    @property
    def name(self) -> str:
        return self.served_model_name or self.model.resolve().name

    @property
    def where(self) -> str:
        """The address it listens on, for people."""
        return f"host {self.host}, port {self.port}"

    def read_chat_template(self) -> str | None:
        if self.chat_template is None:
            return None
        try:
            return self.chat_template.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"chat_template {self.chat_template} cannot be read: {error}") from None
