"""The help format of commands with their own argument parser: as wide as the others, with the same ending."""

from __future__ import annotations

import argparse
import shutil
import textwrap

MOST_COLUMNS = 100


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps examples as written, and limits the width of lines."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=min(MOST_COLUMNS, shutil.get_terminal_size().columns) - 2)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Wrap sentences; text with line breaks of its own keeps them."""
        if "\n" in text.strip():
            return super()._fill_text(text, width, indent)
        return textwrap.fill(text, width, initial_indent=indent, subsequent_indent=indent)
