"""The example in README.md runs as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_the_example_for_engines_runs() -> None:
    [code] = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    end = "assert (match.blocks, good) == (3, 3)\nconnector.close(); daemon.close()\n"
    subprocess.run([sys.executable, "-c", code + end], cwd=ROOT, check=True, timeout=100)
