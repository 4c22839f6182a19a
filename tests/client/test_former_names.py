"""Programs that import modules by the names of 0.1 still find them, and get a warning."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys

import pytest

from tiercache.ground.former_names import _present_names


def test_every_former_name_leads_to_a_module_that_is_there() -> None:
    present = _present_names()
    assert len(present) > 150
    assert [name for name in present.values() if importlib.util.find_spec(name) is None] == []
    assert [name for name in present if name in present.values()] == []


def test_a_former_name_is_the_same_module_and_says_where_that_is() -> None:
    code = (
        "import warnings; warnings.simplefilter('error', DeprecationWarning); import tiercache\n"
        "try: import tiercache.layout\n"
        "except DeprecationWarning as warning: print(warning)\n"
        "warnings.simplefilter('ignore'); import tiercache.layout\n"
        "from tiercache.layout import NamespaceSpec\n"
        "from tiercache.messages import Match; from tiercache.messages.requests import Match as other\n"
        "import tiercache.protocol.namespaces as present\n"
        "assert tiercache.layout is present and NamespaceSpec is tiercache.NamespaceSpec and Match is other\n"
        "assert present.__spec__.name == present.__name__ == 'tiercache.protocol.namespaces'\n"
        "assert importlib.reload(present) is present\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"import importlib\n{code}"], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "tiercache.layout is tiercache.protocol.namespaces now\n"


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("client", "Client"),
        ("connector", "Connector"),
        ("config", "DaemonConfig"),
        ("daemon.index", "Index"),
        ("daemon.hints", "Hints"),
        ("daemon.events", "Events"),
    ],
)
def test_folders_with_the_name_of_a_former_module_have_what_it_had(folder: str, name: str) -> None:
    package = importlib.import_module(f"tiercache.{folder}")
    with pytest.warns(DeprecationWarning, match=rf"{name} is in tiercache\.{folder}\."):
        assert getattr(package, name).__name__ == name
    with pytest.raises(AttributeError, match=f"module 'tiercache.{folder}' has no attribute 'nonsense'"):
        _ = package.nonsense


def test_the_function_launch_is_not_hidden_by_its_former_module() -> None:
    for first in ("from tiercache.launch import LaunchedDaemon", "import tiercache.launch", "pass"):
        code = f"import tiercache; {first}; from tiercache import launch; assert tiercache.launch is launch"
        subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=60)


def test_former_names_run_as_programs() -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tiercache.settings_schema"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert '"arena"' in done.stdout


def test_what_never_was_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError, match="No module named"):
        importlib.import_module("tiercache.nonsense")
    sys.modules.pop("tiercache.messages", None)
    with pytest.warns(DeprecationWarning, match=r"tiercache\.messages is"):
        found = importlib.util.find_spec("tiercache.messages.nonsense")
    assert found is None
