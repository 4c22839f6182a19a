"""Kubernetes' own schemas, and Helm to render a chart with; tests are skipped where these are not installed."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest


class RefusedValues(Exception):
    """Helm rejected the values, the schema or the templates."""


def objects_of(text: str) -> list[dict[str, Any]]:
    """The documents of a text, none of them empty."""
    yaml: Any = pytest.importorskip("yaml")
    return [document for document in yaml.safe_load_all(text) if document]


def validate(text: str) -> list[dict[str, Any]]:
    """The objects of a text, of which those of Kubernetes itself fit its schema."""
    validator: Any = pytest.importorskip("kubernetes_validate")
    objects = objects_of(text)
    known = [one for one in objects if not one["apiVersion"].startswith("monitoring.coreos.com")]
    for one in known:
        validator.validate(one, "1.30", strict=True)
    assert known
    return objects


def render(chart: Path, values: Mapping[str, Any]) -> str:
    """The chart's objects, by Helm's engine: the program, or the library helm-python-sdk. Raises RefusedValues."""
    if program := shutil.which("helm"):
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            file.write(json.dumps(values))  # JSON is YAML
            file.flush()
            command = [program, "template", "demo", str(chart), "--namespace", "prod", "--values", file.name]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode:
            raise RefusedValues(done.stderr)
        return done.stdout
    library: Any = pytest.importorskip("helm_python", reason="neither helm nor helm-python-sdk is installed")
    try:
        with library.Chart.load(str(chart)) as loaded:
            rendered = loaded.render(dict(values), name="demo", namespace="prod")
    except library.HelmError as error:
        raise RefusedValues(str(error)) from error
    return "\n---\n".join(text for name, text in rendered.items() if name.endswith(".yaml"))
