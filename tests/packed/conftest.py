"""Lets tests import the modules beside them, those of GGUF tests, and `schemes` of tests/unit."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "gguf"), str(HERE.parent / "unit")]
