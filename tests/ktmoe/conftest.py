"""Lets the tests import `ktmoe_layers`, and gives them a driver that is none: stub_driver.c."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from ktmoe_driver import Stub  # noqa: E402

from ktk import _core  # noqa: E402


@pytest.fixture(scope="session")
def driver(stub_path: Path) -> Stub:
    """The stub, as the driver of this process."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA driver of its own: test_gpu.py uses that")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KTK_CUDA_LIBRARY", str(stub_path))
        assert _core.cuda_library() == str(stub_path), "a driver was loaded before"
    return Stub(stub_path)


@pytest.fixture
def stream(driver: Stub) -> Iterator[int]:
    handle = driver.stream()
    yield handle
    driver.synchronize(handle)
    driver.destroy(handle)
