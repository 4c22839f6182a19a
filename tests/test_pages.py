"""The pages about the life of a block name functions and classes that are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NAMED = re.compile(r"`([\w/]+\.py)(?::(\w+)(?:\.(\w+))?)?`")
DEFINITIONS = ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef


def is_there(path: str, name: str, member: str) -> bool:
    """Whether a file has a class or function of that name, and the class that member, itself or from a base here."""
    file = ROOT / path
    if not file.is_file():
        return False
    found = [one for one in ast.walk(ast.parse(file.read_text())) if isinstance(one, DEFINITIONS) and one.name == name]
    if not name or (found and not member):
        return True
    members = [one.name for its in found for one in ast.walk(its) if isinstance(one, DEFINITIONS)]
    return member in members


@pytest.mark.parametrize("page", ["BLOCK.md", "INVARIANTS.md"])
def test_what_a_page_names_is_there(page: str) -> None:
    named = NAMED.findall((ROOT / "daemon" / page).read_text())
    assert len(named) > 10
    assert [one for one in named if not is_there(*one)] == []
