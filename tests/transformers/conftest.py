"""Lets the tests import `tiny` and tests/unit's `schemes`; without transformers there are none."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path += [str(HERE), str(HERE.parent / "unit")]

pytest.importorskip("transformers", reason='needs transformers: pip install "ktk[run]"')


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Matrices of tiny models are not worth a second thread, and workers have their own."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
