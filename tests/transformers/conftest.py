"""Lets the tests import `tiny`, and modules beside tests of units and of text.

Without transformers there are none.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
sys.path += [str(HERE), str(HERE.parent / "unit"), str(HERE.parent / "text")]

pytest.importorskip("transformers", reason='needs transformers: pip install "ktk[run]"')


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Matrices of tiny models are not worth a second thread, and workers have their own."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a folder with a model, and what it computes in float32."""
    from tiny import FAMILIES, Reference

    return Reference.of(FAMILIES["qwen3-moe"].save(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def saved_tied(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the same of a model whose head is its embedding."""
    from dense_layers import tied
    from tiny import Reference

    return Reference.of(tied("qwen3-moe").save(tmp_path_factory.mktemp("tied")))
