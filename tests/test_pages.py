"""Pages name what is there and lead somewhere: functions, files, headings; and the example of README.md runs."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
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


def test_rows_of_pages_are_found() -> None:
    assert sum(len(in_rows(page_of(folder))) for folder in PACKAGES) > 200


@pytest.mark.parametrize("folder", PACKAGES, ids=lambda folder: str(folder.relative_to(ROOT)))
def test_the_page_of_a_folder_names_its_parts(folder: Path) -> None:
    page, parts = page_of(folder), parts_of(folder)
    assert [name for name in in_rows(page) if name not in parts] == [], "rows about parts that are not there"
    assert parts - set(re.findall(r"\w+", page)) == set(), "parts that the page leaves out"


LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)|\bsrc(?:set)?=\"([^\"]+)\"")
"""In Markdown, or of a picture in HTML."""
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def documents() -> list[Path]:
    """All pages, each once: the symbolic links in tiercache/ lead to folders that are walked by themselves."""
    folders = [ROOT / name for name in ("bench", "connectors", "daemon", "kernels", "tests")]
    folders += [path for path in (ROOT / "tiercache").iterdir() if path.is_dir() and not path.is_symlink()]
    return sorted([*ROOT.glob("*.md"), *(page for folder in folders for page in folder.rglob("*.md"))])


def links(text: str) -> list[str]:
    """Where the links and pictures of a page lead; blocks of code have none."""
    return [markdown or picture for markdown, picture in LINK.findall(FENCED.sub("", text))]


def anchors(page: Path) -> set[str]:
    """The names that headings have in links, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken(page: Path) -> list[str]:
    """The links of a page that lead nowhere."""
    found = []
    for link in links(page.read_text()):
        path, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", link):
            continue  # to another site
        target = page if not path else (page.parent / path).resolve()
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            found.append(f"{os.path.relpath(page, ROOT)}: {link}")
    return found


def test_every_link_leads_somewhere() -> None:
    pages = documents()
    assert len(pages) > 8
    assert sum(len(links(page.read_text())) for page in pages) > 50
    assert [link for page in pages for link in broken(page)] == []


def test_each_entry_of_the_log_is_in_its_table_once() -> None:
    table, _, entries = (ROOT / "bench/LOG.md").read_text().partition("\n## ")
    titles = re.findall(r"^## (.+)$", "## " + entries, re.MULTILINE)
    rows = re.findall(r"^\| (\S+) \| \[(.+)\]\(#", table, re.MULTILINE)
    assert len(titles) > 90
    assert sorted(f"{date}: {question}" for date, question in rows) == sorted(titles)


def test_each_test_in_the_table_of_faults_is_there() -> None:
    page = ROOT / "tests/connectors/vllm/README.md"
    table = page.read_text().partition("## Faults")[2]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 20
    for row in rows:
        named = re.findall(r"`([\w/.]+)`", row.rsplit(" | ", 1)[1])
        assert named, row
        source = ""
        for name in named:
            if "test_" in name:
                source = (page.parent / f"{name}.py").read_text()
            else:
                assert re.search(rf"def test_\w*{name}", source), f"{row}: no test is called {name}"


def test_the_example_for_engines_runs() -> None:
    [code] = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    end = "assert (match.blocks, good) == (3, 3)\nconnector.close(); daemon.close()\n"
    subprocess.run([sys.executable, "-c", code + end], cwd=ROOT, check=True, timeout=100)
