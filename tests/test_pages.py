"""Pages name what is there: those about the life of a block its functions, and each folder's docstring its files."""

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


# --- folders -----------------------------------------------------------------------------------------
#
# The docstring of a package is the page of its folder: most have a table of its files, some a drawing.

TOP = [ROOT / name for name in ("bench", "connectors", "daemon", "kernels")]
TOP += [path for path in (ROOT / "tiercache").iterdir() if path.is_dir() and not path.is_symlink()]
PACKAGES = sorted(file.parent for top in TOP for file in top.rglob("__init__.py"))
_NAMES = r"([a-z]\w*/?(?:, [a-z]\w*/?)*) {2,}(?=[\w`(])"
ROW = re.compile(rf"^[ │├└─►]*{_NAMES}| {{3,}}{_NAMES}", re.MULTILINE)
"""The first column of a row, perhaps behind a branch of a tree; or that of a second table beside the first one."""


def parts_of(folder: Path) -> set[str]:
    """The files and packages in a folder, without suffix."""
    files = {path.stem for path in folder.glob("*.py")} - {"__init__", "__main__"}
    return files | {path.parent.name for path in folder.glob("*/__init__.py")}


def page_of(folder: Path) -> str:
    return ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""


def in_rows(page: str) -> list[str]:
    """The names that begin the rows of a page's tables."""
    return [name.strip("/") for first, second in ROW.findall(page) for name in (first or second).split(", ")]


def test_rows_of_a_page_are_found() -> None:
    page = """Stores that hosts share.

    a table            of files
      ├ here           in a tree
    one, two           beside each other        three    in a second column
    four/              a folder
    match ─► five      is a drawing
    """
    assert in_rows(page) == ["here", "one", "two", "three", "four"]


@pytest.mark.parametrize("folder", PACKAGES, ids=lambda folder: str(folder.relative_to(ROOT)))
def test_the_page_of_a_folder_names_its_parts(folder: Path) -> None:
    page, parts = page_of(folder), parts_of(folder)
    assert [name for name in in_rows(page) if name not in parts] == [], "rows about parts that are not there"
    assert parts - set(re.findall(r"\w+", page)) == set(), "parts that the page leaves out"
