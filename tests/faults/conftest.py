"""Lets tests import those that make checkpoints."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "packed"))
