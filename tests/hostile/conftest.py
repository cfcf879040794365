"""Lets tests import the modules beside them, and those that write GGUF files."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "gguf")]
