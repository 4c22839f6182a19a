"""How commands that read their own command line show their help: as wide as the others, and ended like them."""

from __future__ import annotations

import argparse
import shutil
import textwrap

MOST_COLUMNS = 100


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Examples as they are written, and no line that is wider than people read."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=min(MOST_COLUMNS, shutil.get_terminal_size().columns) - 2)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Sentences are wrapped; what has lines of its own keeps them."""
        if "\n" in text.strip():
            return super()._fill_text(text, width, indent)
        return textwrap.fill(text, width, initial_indent=indent, subsequent_indent=indent)
