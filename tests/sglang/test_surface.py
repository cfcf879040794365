"""What the two releases use of kt_kernel at all: what ktk lacks would else show in use."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest
import sglang_wheels

import ktk
import ktk.ktmoe
from ktk import KTMoEWrapper

#: For adapters that are served, which ktk does not do; asking for them is refused at once.
OF_ADAPTERS = {
    "init_lora_weights",
    "load_block_fp8_weights",
    "load_rawint4_weights",
    "share_backward_bb",
    "submit_forward_inference",
    "sync_forward_inference",
}
RUNNERS = {
    "sglang-kt": "sglang/srt/model_executor/cuda_graph_runner.py",
    "sglang": "sglang/srt/model_executor/runner/decode_cuda_graph_runner.py",
}


@pytest.fixture(params=[sglang_wheels.FORK, sglang_wheels.MAINLINE], ids=lambda w: w.name)
def files(request: pytest.FixtureRequest) -> Path:
    folder: Path = request.param.files()
    return folder


def imports(files: Path) -> Iterator[tuple[str, str]]:
    """Yield what any file imports of kt_kernel: the module, and the name."""
    for path in files.rglob("*.py"):
        text = path.read_text(errors="replace")
        if "kt_kernel" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kt_kernel"):
                yield from ((node.module or "", alias.name) for alias in node.names)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    assert not alias.name.startswith("kt_kernel"), path


def test_what_is_imported_is_there(files: Path) -> None:
    found = set(imports(files))
    assert ("kt_kernel", "KTMoEWrapper") in found
    of_module = {name for module, name in found if module == "kt_kernel"}
    assert of_module <= {"KTMoEWrapper", "generate_gpu_experts_masks", "kt_kernel_ext"}
    assert all(module.startswith("kt_kernel.sft") for module, _ in found if module != "kt_kernel")


def test_what_is_used_of_a_layer_is_there(files: Path) -> None:
    tree = ast.parse((files / sglang_wheels.WRAPPER).read_text())
    used = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = node.value
            name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
            if name == "wrapper":
                used.add(node.attr)
    assert {"submit_forward", "sync_forward", "load_weights"} <= used
    layer = KTMoEWrapper(0, 4, 2, 64, 64, method="BF16")
    missing = {name for name in used if not hasattr(layer, name)}
    assert missing <= OF_ADAPTERS, missing


def test_arguments_of_the_constructor_are_known(files: Path) -> None:
    known = set(inspect.signature(KTMoEWrapper.__init__).parameters)
    named: set[str] = set()
    for node in ast.walk(ast.parse((files / sglang_wheels.WRAPPER).read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "KTMoEWrapper":
            assert not node.args
            named |= {keyword.arg for keyword in node.keywords if keyword.arg}
    assert {"method", "max_deferred_experts_per_token"} <= named
    assert named <= known


def test_sizes_of_captures_are_set_by_one_list(files: Path) -> None:
    [name] = [name for name in RUNNERS if (files / RUNNERS[name]).is_file()]
    calls = [
        node
        for node in ast.walk(ast.parse((files / RUNNERS[name]).read_text()))
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "KTMoEWrapper"
    ]
    assert [node.attr for node in calls] == ["set_capture_batch_sizes"]
    ktk.KTMoEWrapper.set_capture_batch_sizes([1, 2, 4])
    assert ktk.KTMoEWrapper.get_capture_batch_sizes() == [1, 2, 4]
    ktk.KTMoEWrapper.set_capture_batch_sizes([])
