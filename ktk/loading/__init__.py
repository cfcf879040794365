"""Loads the experts of checkpoints into backends.

Readers (`ktk.checkpoint`) say what is stored, and know no backend. What is above them is here:
`default` chooses a backend where the user names none, `route` decides how experts get from the
files into it, `plan` checks that without reading weights, `room` compares it with the memory there
is, and `load` reads expert by expert while the workers pack.
"""

from ktk.loading.default import default_backend
from ktk.loading.load import load_moe

__all__ = ["default_backend", "load_moe"]
