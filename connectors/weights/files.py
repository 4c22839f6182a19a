"""Names of weights by their files: of models and adapters, on disk or from a hub."""

from __future__ import annotations

from pathlib import Path

from tiercache.errors import ModelRefused
from tiercache.protocol.keys import fingerprint_files

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")


def states_of(path: str) -> list[tuple[str, int, int, int]]:
    """State of these files that changes when one is replaced or written to."""
    place = Path(path)
    states = [(file.name, file.stat()) for file in ([place] if place.is_file() else sorted(place.glob("*")))]
    return [(name, state.st_ino, state.st_size, state.st_mtime_ns) for name, state in states]


def content_of(path: str, revision: str | None, load_format: str, code: bool = False) -> str:
    """Identifies the content of a model or an adapter: a commit of a hub, or a hash of all files.

    `code`: it brings code of its own, which is used.
    """
    folder = Path(path)
    if folder.is_file():
        return fingerprint_files([folder])
    if folder.is_dir():
        weights = [] if load_format == "dummy" else [file for kind in WEIGHTS for file in folder.glob(kind)]
        if not weights and load_format != "dummy":
            raise ModelRefused(f"{path} has no weights that could name it: set model_id to what pins them")
        files = [*weights, *folder.glob("*.json"), *(folder.glob("*.py") if code else ())]
        return f"{load_format == 'dummy'} {fingerprint_files(files)}"
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        commit = Path(snapshot_download(path, revision=revision, local_files_only=True)).name
    except (LocalEntryNotFoundError, ValueError) as error:
        raise ModelRefused(f"what pins the weights of {path} is not known: set model_id to it") from error
    return f"{path}@{commit}"
