"""Arrays at odd addresses are refused with a sentence; files with odd offsets load all the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import ktk
from ktk import _core

E, H, I = 2, 64, 32  # noqa: E741
SENTENCE = r"^{} is \[.*\] {} at the address \d+, which is no multiple of its elements' {} bytes"


def shifted(array: np.ndarray) -> np.ndarray:
    """The same values at an address that is one too high."""
    memory = np.empty(array.nbytes + 1, np.uint8)
    moved = memory[1:].view(array.dtype).reshape(array.shape)
    moved[...] = array
    return moved


def layer(backend: str = "BF16") -> ktk.MoE:
    return ktk.load_backend(backend).moe(
        num_experts=E, num_experts_per_tok=1, hidden_size=H, intermediate_size=I
    )


def expert(dtype: Any = np.float32) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    shapes = {"gate": (I, H), "up": (I, H), "down": (H, I)}
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("part", ["gate", "up", "down"])
def test_weights(part: str, dtype: str) -> None:
    arrays = expert(dtype)
    size = np.dtype(dtype).itemsize
    with pytest.raises(ValueError, match=SENTENCE.format(part, dtype, size)):
        layer().load_expert(0, **arrays | {part: shifted(arrays[part])})


def test_scales_and_biases() -> None:
    moe, arrays = layer("AMXINT8"), expert()
    bias = shifted(np.zeros(I, np.float32))
    with pytest.raises(ValueError, match=SENTENCE.format("gate_bias", "float32", 4)):
        moe.load_expert(0, **arrays, gate_bias=bias)
    codes: dict[str, Any] = {name: np.ones(array.shape, np.int8) for name, array in arrays.items()}
    scales: dict[str, Any] = {
        f"{name}_scale": np.ones(len(array), np.float32) for name, array in codes.items()
    }
    moe.load_expert(0, **codes, **scales)
    scales["up_scale"] = shifted(scales["up_scale"])
    with pytest.raises(ValueError, match=SENTENCE.format("up_scale", "float32", 4)):
        moe.load_expert(0, **codes, **scales)


def test_a_factor_beside_blocks() -> None:
    blocks = {
        name: np.zeros((n, k // 32 * 34), np.uint8)
        for name, (n, k) in {"gate": (I, H), "up": (I, H), "down": (H, I)}.items()
    }
    factor = shifted(np.ones(1, np.float32))
    with pytest.raises(ValueError, match=SENTENCE.format("gate_scale", "float32", 4)):
        layer("LLAMAFILE").load_expert(0, **blocks, gate_scale=factor, given=ktk.Format("q8_0"))


@pytest.mark.parametrize("run", [ktk.MoE.__call__, ktk.MoE.submit])
@pytest.mark.parametrize("name", ["hidden", "topk_ids", "topk_weights", "out"])
def test_calls(run: Callable[..., Any], name: str) -> None:
    moe = layer()
    for e in range(E):
        moe.load_expert(e, **expert())
    arrays: dict[str, Any] = {
        "hidden": np.ones((3, H), np.float32),
        "topk_ids": np.zeros((3, 1), np.int64),
        "topk_weights": np.ones((3, 1), np.float32),
        "out": np.empty((3, H), np.float32),
    }
    run(moe, **arrays)
    size = arrays[name].itemsize
    with pytest.raises(ValueError, match=SENTENCE.format(name, arrays[name].dtype, size)):
        run(moe, **arrays | {name: shifted(arrays[name])})


def test_tensors_of_torch() -> None:
    memory = torch.zeros(4 * I * H + 1, dtype=torch.uint8)
    arrays: dict[str, Any] = {name: torch.from_numpy(array) for name, array in expert().items()}
    odd = torch.from_numpy(memory.numpy()[1:].view(np.float32)).reshape(I, H)
    with pytest.raises(ValueError, match=SENTENCE.format("gate", "float32", 4)):
        layer().load_expert(0, **arrays | {"gate": odd})


def test_a_matrix_of_the_tools() -> None:
    backend, weight = ktk.load_backend("BF16").core, expert()["gate"]
    with pytest.raises(ValueError, match=SENTENCE.format("weight", "float32", 4)):
        _core.PackedMatrix(backend, "", shifted(weight))
    matrix = _core.PackedMatrix(backend, "", weight)
    with pytest.raises(ValueError, match=SENTENCE.format("x", "float32", 4)):
        matrix.matmul(shifted(np.ones((2, H), np.float32)))


def test_files_with_odd_offsets_load(tmp_path: Path) -> None:
    config = {
        "model_type": "qwen3_moe",
        "num_experts": E,
        "num_experts_per_tok": 1,
        "hidden_size": H,
        "moe_intermediate_size": I,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    arrays = {name: torch.from_numpy(array).bfloat16() for name, array in expert().items()}
    tensors = {
        f"model.layers.0.mlp.experts.{e}.{name}_proj.weight": array.clone()
        for e in range(E)
        for name, array in arrays.items()
    }
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    expected = ktk.MoE.from_checkpoint(tmp_path, 0, "BF16")
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    path.write_bytes(
        (length + 1).to_bytes(8, "little") + data[8 : 8 + length] + b" " + data[8 + length :]
    )
    found = ktk.MoE.from_checkpoint(tmp_path, 0, "BF16")
    for e in range(E):
        for have, want in zip(found.unpack_expert(e), expected.unpack_expert(e), strict=True):
            np.testing.assert_array_equal(have, want)
