"""Tables of the demo, and its words for a defect."""

from __future__ import annotations

from rich.table import Table

from tiercache.demo.prompt import Run
from tiercache.ground.units import format_duration

DEFECT = "NOT the same: this is a defect, please report it"


def prompt_table(title: str, runs: list[Run], prompt: int) -> Table:
    """A row for each run of a prompt of `tokens` tokens; the first one computed it."""
    table = new_table(title, "run", "TTFT", "faster", "pool", "cache", "computed")
    for run in runs:
        table.add_row(
            run.what,
            format_duration(run.ttft_s),
            f"{runs[0].ttft_s / run.ttft_s:.1f}x",
            str(run.pool_tokens),
            str(run.cache_tokens),
            str(prompt - run.pool_tokens - run.cache_tokens),
        )
    return table


def new_table(title: str, *columns: str) -> Table:
    """An empty table; all columns but the first hold numbers."""
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    return table
