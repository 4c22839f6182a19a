"""Every relative link of the documents leads somewhere: to a file that is there, and to a heading that is in it."""

from __future__ import annotations

import os
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
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
