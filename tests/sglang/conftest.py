"""Files of SGLang's releases, and a driver for its streams."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
for folder in (HERE, HERE.parent / "ktmoe", HERE.parent / "unit", HERE.parent / "gguf"):
    sys.path.insert(0, str(folder))
import sglang_engine  # noqa: E402
import sglang_wheels  # noqa: E402
from ktmoe_driver import Stub  # noqa: E402
from sglang_cuda import Cuda  # noqa: E402

from ktk import _core  # noqa: E402
from ktk.compat import folder as kt_kernel_folder  # noqa: E402
from ktk.sglang import engine  # noqa: E402


@pytest.fixture(scope="session")
def fork() -> Path:
    """sglang-kt."""
    return sglang_wheels.FORK.files()


@pytest.fixture(scope="session")
def mainline() -> Path:
    """sglang."""
    return sglang_wheels.MAINLINE.files()


@pytest.fixture
def patch(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """What is patched in a test; kt_kernel is ktk, and the client may bind its thread."""
    monkeypatch.syspath_prepend(str(kt_kernel_folder()))
    cpus = os.sched_getaffinity(0)
    with torch.compiler.set_stance("force_eager"), torch.no_grad():
        yield monkeypatch
    os.sched_setaffinity(0, cpus)


@pytest.fixture(scope="session")
def stub(stub_path: Path) -> Stub:
    return Stub(stub_path)


@pytest.fixture(params=["pool", "streams"])
def cuda(request: pytest.FixtureRequest, patch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    """torch.cuda, with the handle 0 for every stream, or with streams of the stub."""
    if torch.cuda.is_available():
        pytest.skip("stands in for a GPU, and this machine has one")
    driver = None
    if request.param == "streams":
        driver = request.getfixturevalue("stub")
        patch.setenv("KTK_CUDA_LIBRARY", str(driver.path))
        assert _core.cuda_library() == str(driver.path), "a driver was loaded before"
    made = Cuda(driver)
    made.install(patch)
    yield made
    made.close()


@pytest.fixture
def made(patch: pytest.MonkeyPatch, mainline: Path) -> sglang_engine.Engine:
    """SGLang's files, with the hooks of ktk."""
    loaded = sglang_engine.engine(patch, mainline)
    for name in ("KTK_SGLANG", "KTK_BACKEND"):
        patch.delenv(name, raising=False)
    engine.register()
    loaded.registry.apply_hooks()
    return loaded
