"""Trees of raw numbers for people: sections, as tables on a terminal and as aligned text in a pipe.

A number's unit is the last word of its name (`used_bytes`, `uptime_s`, `p99_us`), so that figures
which later daemons add are shown well too.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from tiercache.ground.units import format_bytes, format_duration

_LONGEST_TEXT = 60
_MOST_COLUMNS = 12
_GAP = 3
"""Blanks of a table on a terminal for each column, and once more at its edges."""
_LINES_AROUND = 4
"""Lines of a table on a terminal besides its rows."""


class Section(NamedTuple):
    """One table. Rows have as many cells as there are columns; a table of two has no head."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def human(name: str, value: Any) -> str:
    """One value formatted for people, by the unit in its name."""
    if name.endswith(_RATE) and isinstance(value, (int, float)):
        base = name.removesuffix(_RATE)
        return f"{format_bytes(value) if base.endswith('bytes') else f'{value:,.1f}'}/s"
    unit = name.rpartition("_")[2]
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None or value == "" or value == [] or value == {}:
        return "-"
    if isinstance(value, (int, float)) and unit not in _IDENTIFIERS:
        if unit == "bytes":
            return format_bytes(value)
        if name.endswith(_POINT_IN_TIME):
            return time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(value))
        if unit in _SECONDS:
            return format_duration(value * _SECONDS[unit])
        return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"
    if isinstance(value, (list, tuple)):
        value = ", ".join(human("", item) for item in value)
    elif isinstance(value, dict):
        value = " ".join(f"{key}={human(str(key), item)}" for key, item in value.items())
    text = printable(str(value))
    return text if len(text) <= _LONGEST_TEXT else text[: _LONGEST_TEXT - 3] + "..."


def printable(text: str) -> str:
    """A text as one line that is safe for a terminal."""
    return "".join(c if c.isprintable() else "?" for c in text)


_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_RATE = "_per_s"
"""Ending of the names of rates: `s` is not a unit of theirs."""
_IDENTIFIERS = {"id", "pid", "generation"}
_POINT_IN_TIME = "unix_s"
"""Ending of the names of numbers that count seconds since 1970, in UTC."""


def with_human(tree: Any) -> Any:
    """The same tree with `<name>_human` beside every number that has a unit."""
    if isinstance(tree, list):
        return [with_human(item) for item in tree]
    if not isinstance(tree, dict):
        return tree
    result: dict[str, Any] = {}
    for name, value in tree.items():
        result[name] = with_human(value)
        unit = str(name).rpartition("_")[2]
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if is_number and (unit == "bytes" or unit in _SECONDS):
            result[f"{name}_human"] = human(str(name), value)
    return result


def print_json(tree: Any, *, indent: int | None = 2) -> None:
    """Print a tree as JSON on stdout; one line with `indent=None`."""
    print(json.dumps(tree, indent=indent, default=str), flush=True)


def sections(tree: dict[str, Any]) -> list[Section]:
    """All numbers of a tree, in one section for each of its branches."""
    loose = {name: value for name, value in tree.items() if not _is_branch(value)}
    found = _branch("general", loose) if loose else []
    for name, value in tree.items():
        if _is_branch(value):
            found += _branch(str(name), value)
    return found


def _is_branch(value: Any) -> bool:
    return isinstance(value, dict) or _is_table(value) or value == []


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def _branch(title: str, branch: Any) -> list[Section]:
    if not branch:
        return [Section(title, ("", ""), [("none", "")])]
    if isinstance(branch, list):
        return [_table(title, [("", row) for row in branch])]
    if all(isinstance(row, dict) for row in branch.values()):
        return _labelled(title, branch)
    inner = [(name, value) for name, value in branch.items() if _is_table(value)]
    outer = {str(name): value for name, value in branch.items() if not _is_table(value)}
    rows = [row for name, value in outer.items() for row in _listed(name, value)]
    found = [Section(title, ("", ""), rows)] if rows else []
    for name, value in inner:
        found += _branch(f"{title} {name}", value)
    return found


def _labelled(title: str, branch: dict[str, dict[str, Any]]) -> list[Section]:
    """A table with a row for each label, followed by the tables within the rows."""
    inner = [
        (f"{title} {label} {name}", value)
        for label, row in branch.items()
        for name, value in row.items()
        if _is_table(value)
    ]
    rows = {
        str(label): {name: value for name, value in row.items() if not _is_table(value)}
        for label, row in branch.items()
    }
    found = [_table(title, list(rows.items()), first=title)]
    for name, value in inner:
        found += _branch(name, value)
    return found


def _listed(name: str, value: Any) -> Iterable[tuple[str, str]]:
    """Rows of a section of two columns. Texts are not cut, and each of several has its row: a reason ends with its
    remedy."""
    texts = value if isinstance(value, (list, tuple)) else [value]
    if texts and all(isinstance(text, str) and text for text in texts):
        yield from ((name if number == 0 else "", printable(text)) for number, text in enumerate(texts))
    elif isinstance(value, dict) and value:
        for inner, item in value.items():
            yield from _listed(f"{name}.{inner}", item)
    else:
        yield name, human(name, value)


def _flat(name: str, value: Any) -> Iterable[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for inner, item in value.items():
            yield from _flat(f"{name}.{inner}", item)
    else:
        yield name, human(name, value)


def _table(title: str, rows: list[tuple[str, dict[str, Any]]], *, first: str = "") -> Section:
    flat = [
        dict(cell for name, value in row.items() if value != {} for cell in _flat(str(name), value)) for _, row in rows
    ]
    names = list(dict.fromkeys(name for row in flat for name in row))
    body = [[row.get(name, "-") for name in names] for row in flat]
    if not first:
        return Section(title, tuple(names), [tuple(cells) for cells in body])
    labelled = [(str(label), *row) for (label, _), row in zip(rows, body, strict=True)]
    found = Section(title, (first, *names), labelled)
    return _turned(found) if len(names) > _MOST_COLUMNS else found  # few rows with many columns


def _numeric(section: Section, column: int) -> bool:
    """True if a column reads better aligned to the right."""
    cells = [row[column] for row in section.rows]
    return column > 0 and all(cell[:1].isdigit() or cell in ("-", "yes", "no") for cell in cells)


def print_sections(found: list[Section]) -> None:
    """Print sections on stdout: rich tables on a terminal, plain aligned text otherwise.

    Titles, columns and cells may be names that clients gave: no control character of theirs reaches the terminal.
    """
    found = [
        Section(printable(title), tuple(map(printable, columns)), [tuple(map(printable, row)) for row in rows])
        for title, columns, rows in found
    ]
    if sys.stdout.isatty():
        _print_tables(found)
        return
    for index, section in enumerate(found):
        print(("\n" if index else "") + f"# {section.title}")
        rows = section.rows if section.columns == ("", "") else [section.columns, *section.rows]
        for line in align(rows, [_numeric(section, column) for column in range(len(section.columns))]):
            print(line)


def align(rows: Sequence[tuple[str, ...]], to_right: list[bool]) -> list[str]:
    """Rows of cells as lines with aligned columns."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = zip(row, widths, to_right, strict=True)
        line = "  ".join(cell.rjust(width) if right else cell.ljust(width) for cell, width, right in cells)
        lines.append(line.rstrip())
    return lines


def fitting(section: Section, width: int) -> list[Section]:
    """The section as tables of at most `width` characters, as far as its cells allow.

    A table that is too wide is turned, or its columns stand in several tables, each with the first column again:
    whichever takes fewer lines.
    """
    if section.columns == ("", "") or _width(section) <= width:
        return [section]
    parts = _parts(section, width)
    turned = _turned(section)
    if _width(turned) <= width and len(turned.rows) <= len(parts) * (len(section.rows) + _LINES_AROUND):
        return [turned]
    return parts


def _width(section: Section) -> int:
    return _GAP + sum(_widths(section))


def _widths(section: Section) -> list[int]:
    return [max(map(len, column)) + _GAP for column in zip(section.columns, *section.rows, strict=True)]


def _turned(section: Section) -> Section:
    """The same table with a column for each row."""
    first, *others = zip(section.columns, *section.rows, strict=True)
    return Section(section.title, first, others)


def _parts(section: Section, width: int) -> list[Section]:
    """Tables that share out all columns; each also has the first."""
    widths = _widths(section)
    parts: list[list[int]] = []
    used = width
    for place in range(1, len(widths)):
        if used + widths[place] > width:
            parts.append([0])
            used = _GAP + widths[0]
        parts[-1].append(place)
        used += widths[place]
    return [
        Section(
            f"{section.title} ({number} of {len(parts)})",
            tuple(section.columns[place] for place in part),
            [tuple(row[place] for place in part) for row in section.rows],
        )
        for number, part in enumerate(parts, 1)
    ]


def _print_tables(found: list[Section]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    for section in (part for whole in found for part in fitting(whole, console.width)):
        table = Table(title=Text(section.title, "bold"), title_justify="left", box=box.SIMPLE_HEAD)
        table.show_header = section.columns != ("", "")
        for index, column in enumerate(section.columns):
            table.add_column(Text(column), justify="right" if _numeric(section, index) else "left")
        for row in section.rows:
            table.add_row(*map(Text, row))
        console.print(table)
