"""Lets tests import the modules beside them, and those that make files and damage them."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), *(str(HERE.parent / name) for name in ("hostile", "gguf", "unit"))]
