"""ggml's types as elements of ktk's formats."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

import ktk
from ktk import Format, _core

# What is no weight: activations, plain integers; and the floats, which are elements already.
OTHERS = {
    *("Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64"),
    *("F32", "F16", "BF16"),
}
# No backend computes with it; ktk decodes it.
UNREAD = {"Q1_0"}
BLOCK_TYPES = [kind for kind in GGMLQuantizationType if kind.name not in OTHERS | UNREAD]


@pytest.mark.parametrize("kind", BLOCK_TYPES, ids=lambda kind: kind.name)
def test_blocks_are_as_large_as_the_gguf_package_says(kind: GGMLQuantizationType) -> None:
    fmt = Format(kind.name.lower())
    assert fmt.block == GGML_QUANT_SIZES[kind]
    assert (fmt.group_n, fmt.group_k) == (1, GGML_QUANT_SIZES[kind][0])
    assert fmt == Format(f"ggml:{kind.value}")
    assert (fmt.element, str(fmt)) == (kind.name.lower(),) * 2


def test_types_without_a_name_keep_their_number() -> None:
    fmt = Format("ggml:99")
    assert (fmt.element, fmt.block) == ("ggml:99", (0, 0))
    for name in ("ggml:", "ggml:x", "ggml:12x", "ggml:70000", "q4_x"):
        with pytest.raises(ValueError, match=f"'{name}' is not an element type"):
            Format(name)


def test_blocks_have_no_scales_beside_them() -> None:
    with pytest.raises(ValueError, match="q4_0 has its scales in its blocks"):
        Format("q4_0", "f16")


@pytest.mark.parametrize(
    ("rows", "given", "message"),
    [
        (np.zeros((3, 143), np.uint8), "q4_k", r"rows are not made of whole blocks of q4_k \(256"),
        (np.zeros((3, 0), np.uint8), "q4_k", "weight is empty"),
        (np.zeros((3, 144), np.uint8), "q4_k", "does not take weights in q4_k; it takes bf16"),
    ],
)
def test_rows_are_whole_blocks(rows: np.ndarray, given: str, message: str) -> None:
    core = ktk.load_backend("BF16").core
    with pytest.raises(ValueError, match=message):
        _core.PackedMatrix(core, "avx2", rows, given=Format(given), force=True)


@pytest.mark.parametrize(
    ("rows", "given"),
    [(np.zeros((3, 36), np.float32), "q4_k"), (np.zeros((3, 144), np.uint8), "ggml:99")],
)
def test_blocks_are_bytes_of_a_known_type(rows: np.ndarray, given: str) -> None:
    core = ktk.load_backend("BF16").core
    with pytest.raises(TypeError, match=f"which cannot hold {given}"):
        _core.PackedMatrix(core, "avx2", rows, given=Format(given), force=True)


def test_depths_and_shapes_are_checked_in_blocks() -> None:
    sizes: dict[str, Any] = {"num_experts": 1, "num_experts_per_tok": 1, "hidden_size": 64}
    moe = ktk.load_backend("BF16").moe(intermediate_size=48, **sizes)
    gate = np.zeros((48, 36), np.uint8)
    with pytest.raises(ValueError, match=r"down: depth 48 is not made of whole blocks of q4_0"):
        moe.load_expert(0, gate, gate, np.zeros((64, 27), np.uint8), given=Format("q4_0"))
    with pytest.raises(ValueError, match=r"up must have shape \[48, 36\], got \[48, 35\] uint8"):
        moe.load_expert(0, gate, gate[:, :35], gate, given=Format("q4_0"))


class OnGpu:
    """An array that says it is in the memory of a GPU."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0  # kDLCUDA

    def __dlpack__(self, **_: Any) -> Any:
        capsule = self.array.__dlpack__()
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        # DLTensor: the data's address, then the kind of device.
        ctypes.c_int32.from_address(pointer(capsule, b"dltensor") + 8).value = 2
        return capsule


def test_a_factor_beside_blocks_is_read_in_cpu_memory_only() -> None:
    sizes: dict[str, Any] = {"num_experts": 1, "num_experts_per_tok": 1, "hidden_size": 64}
    moe = ktk.load_backend("BF16").moe(intermediate_size=64, **sizes)
    blocks = np.zeros((64, 36), np.uint8)
    factor: Any = OnGpu(np.ones(1, np.float32))
    with pytest.raises(TypeError, match="up_scale must be in CPU memory"):
        moe._core.load_expert(0, blocks, blocks, blocks, up_scale=factor, given=Format("q4_0"))


def test_any_rows_are_unpacked_and_no_others() -> None:
    core = ktk.load_backend("BF16").core
    step = next(v.n_step for v in core.variants if v.name == "avx2")
    weight = (np.arange((2 * step + 3) * 4, dtype=np.float32) % 251).reshape(-1, 4)
    packed = _core.PackedMatrix(core, "avx2", weight, force=True)
    for begin, end in ((0, step - 1), (1, step + 2), (step, len(weight)), (2 * step, 2 * step + 1)):
        assert np.array_equal(packed.unpack(begin, end), weight[begin:end])
    for begin, end in ((0, 2 * step + 4), (step, 0), (step, step)):
        with pytest.raises(ValueError, match="there are no such rows"):
            packed.unpack(begin, end)
