"""Lets the tests import `gguf_files`, and what reads experts that are still in files."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = map(str, (Path(__file__).parent, Path(__file__).parents[1] / "unit"))
