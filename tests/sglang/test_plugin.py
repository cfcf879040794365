"""ktk as a plug-in of mainline SGLang: found by its own loader, and kt_kernel where none is."""

from __future__ import annotations

import importlib.util
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sglang_checkpoints as checkpoints
import sglang_mainline
from sglang_cuda import Cuda
from sglang_expected import check_sum, on_cpu, on_gpu
from sglang_stage import load, stage

import ktk.sglang
from ktk import compat
from ktk.sglang import hybrid

GROUP = "sglang.srt.plugins"
REGISTER = "ktk.sglang:register"


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment without any kt_kernel."""
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one != str(compat.folder())])
    for name in [*sys.modules]:
        if name.partition(".")[0] == "kt_kernel":
            monkeypatch.delitem(sys.modules, name)
    if importlib.util.find_spec("kt_kernel"):
        pytest.skip("kt-kernel is installed here")
    monkeypatch.delenv("KTK_SGLANG", raising=False)
    return monkeypatch


def plugins(patch: pytest.MonkeyPatch, files: Path) -> Any:
    """Load SGLang's own loader of plug-ins, which finds one."""
    load(patch, files, f"{GROUP}.hook_registry")
    module = load(patch, files, GROUP)
    found = [EntryPoint("ktk", REGISTER, GROUP)]
    patch.setattr(module, "entry_points", lambda group: found if group == GROUP else [])
    return module


def standins(path: Path) -> dict[str, dict[str, Any]]:
    unset = SimpleNamespace(get=lambda: None)
    made = sglang_mainline.standins(path, "BF16")
    made["sglang.srt.utils"]["is_cpu"] = lambda: False
    envs = SimpleNamespace(SGLANG_PLUGINS=unset, SGLANG_PLATFORM=unset)
    return made | {"sglang.srt.environ": {"envs": envs}}


def test_the_entry_point_is_announced() -> None:
    project = next(
        folder for folder in Path(__file__).parents if (folder / "pyproject.toml").is_file()
    )
    announced = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    assert announced["entry-points"][GROUP] == {"ktk": REGISTER}


@pytest.mark.parametrize("cuda", ["pool"], indirect=True)
def test_options_work_though_no_kt_kernel_is_installed(
    cuda: Cuda, bare: pytest.MonkeyPatch, mainline: Path, tmp_path: Path
) -> None:
    bare.setattr(sys, "path", [one for one in sys.path if one != str(compat.folder())])
    path = checkpoints.write(tmp_path / "model", "bf16")
    # As in SGLang, the wrapper is imported before plug-ins run, and remembers what it found.
    client = stage(bare, mainline, standins(path), sglang_mainline.NAME)
    assert not client.KTRANSFORMERS_AVAILABLE
    plugins(bare, mainline).load_plugins()
    assert client.KTRANSFORMERS_AVAILABLE
    layer = sglang_mainline.Layer(client, 0, "bf16")
    inputs = checkpoints.inputs(5)
    got = layer(*(one.clone() for one in inputs))
    mask = layer.cpu.gpu_experts_mask
    other = on_gpu(layer.quant_method.gpu_method, "bf16", 0, inputs, mask)
    check_sum(got, on_cpu(layer.cpu, "bf16", inputs, mask), other, "with the plug-in")


def test_a_kt_kernel_that_is_installed_stays(bare: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "kt_kernel"
    package.mkdir()
    (package / "__init__.py").write_text("")
    bare.syspath_prepend(str(tmp_path))
    importer = SimpleNamespace(KTRANSFORMERS_AVAILABLE=False)
    bare.setitem(sys.modules, hybrid.IMPORTERS[0], importer)
    hybrid.provide()
    assert str(compat.folder()) not in sys.path
    assert not importer.KTRANSFORMERS_AVAILABLE


@pytest.mark.slow
def test_modules_that_remember_an_import_are_those(mainline: Path) -> None:
    found = {
        ".".join(path.relative_to(mainline).with_suffix("").parts)
        for path in mainline.rglob("*.py")
        if "KTRANSFORMERS_AVAILABLE = True" in path.read_text(errors="replace")
    }
    assert found == set(hybrid.IMPORTERS)


def test_nothing_is_done_where_ktk_is_not_wanted(bare: pytest.MonkeyPatch) -> None:
    bare.setenv("KTK_SGLANG", "0")
    before = list(sys.path)
    ktk.sglang.register()
    assert sys.path == before


def test_another_sglang_is_left_alone_with_a_line(
    bare: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import ktk.sglang.engine as engine

    def moved() -> None:
        raise ImportError("cannot import name 'HookRegistry'")

    bare.setattr(engine, "register", moved)
    with caplog.at_level("WARNING"):
        ktk.sglang.register()
    assert "has its layers elsewhere than ktk looks for them" in caplog.text
