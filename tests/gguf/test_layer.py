"""Layers of GGUF files compute what float64 arithmetic on their decoded weights gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf_files as files
import loading_memory
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf_files import E, H, Tensor

import ktk
from ktk.demo import run_demo

# What the backends promise, and what rounding three matrices to bf16 costs besides.
ROUNDED = 0.0017
PROMISED = {
    "BF16": (0.0025**2 + 3 * ROUNDED**2) ** 0.5,
    "AMXINT8": 0.0280,
    # 16 levels for 128 values lose a tenth of each matrix.
    "AMXINT4": 3**0.5 * 0.1,
    # The file's weights as they are; int8 activations of three products.
    "LLAMAFILE": 3**0.5 * 0.012,
}
SIZE = 1024  # of the large layer
Values = np.ndarray[Any, np.dtype[np.float64]]


def sigmoid(x: Values) -> Values:
    return 1 / (1 + np.exp(-x))


def silu(gate: Values, up: Values) -> Values:
    return gate * sigmoid(gate) * up


def gelu_tanh(gate: Values, up: Values) -> Values:
    return gate * sigmoid(2 * np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)) * up


def swigluoai(gate: Values, up: Values) -> Values:
    gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
    return gate * sigmoid(1.702 * gate) * (up + 1)


def situ(gate: Values, up: Values) -> Values:
    return 2 * np.tanh(gate / 2) * sigmoid(gate) * 3 * np.tanh(up / 3)


def expected(
    parts: dict[str, Tensor], activation: Any, hidden: Values, ids: Any, weights: Values
) -> Values:
    """Compute one token and one expert after the other."""
    values = {name: stack.values for name, stack in parts.items()}
    bias = {name: values.get(f"{name}_bias", np.zeros((E, 1))) for name in files.PARTS}
    scale = {name: values.get(f"{name}_scale", np.ones(E)) for name in files.PARTS}
    result = np.zeros_like(hidden)
    for token, (chosen, factors) in enumerate(zip(ids, weights, strict=True)):
        for e, factor in zip(chosen, factors, strict=True):
            gate = scale["gate"][e] * (values["gate"][e] @ hidden[token]) + bias["gate"][e]
            up = scale["up"][e] * (values["up"][e] @ hidden[token]) + bias["up"][e]
            inner = activation(gate, up)
            down = scale["down"][e] * (values["down"][e] @ inner)
            result[token] += factor * (down + bias["down"][e])
    return result


def scaled(parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """Put a scale beside each matrix, as the converters for NVFP4 do.

    Small ones for gate: where silu bends, it makes more of relative errors.
    """
    scales = {
        f"{part}_scale": Tensor(np.linspace(0.125, 0.25 + at, E, dtype=np.float32), Type.F32)
        for at, part in enumerate(files.PARTS)
    }
    return {**parts, **scales}


CASES = {
    "scaled": (
        "qwen3moe",
        files.stacked,
        scaled(files.experts("Q8_0", "Q5_1", "Q5_0", bias=True)),
        silu,
    ),
    "qwen3moe": ("qwen3moe", files.stacked, files.experts("Q8_0", "Q4_1", "Q5_0"), silu),
    "mixed": ("qwen3moe", files.stacked, files.experts("Q8_0", "BF16", "F16"), silu),
    "plain": ("olmoe", files.stacked, files.experts("BF16", "F16", "F32"), silu),
    "mixtral": ("llama", files.single, files.experts("Q4_0", down="Q5_1"), silu),
    "gemma4": ("gemma4", files.fused, files.experts("Q8_0"), gelu_tanh),
    "gpt-oss": ("gpt-oss", files.stacked, files.experts("MXFP4", bias=True), swigluoai),
    "kimi-k3": ("kimi-k3", files.stacked, files.experts("MXFP4"), situ),
}
# What llama.cpp writes of Kimi-K3: experts are narrower than the model.
OWN: dict[str, dict[str, Any]] = {
    "kimi-k3": {
        "embedding_length": 2 * H,
        "expert_latent_length": H,
        "activation.situ_beta": 2.0,
        "activation.situ_linear_beta": 3.0,
    }
}


@pytest.mark.parametrize("backend", PROMISED)
@pytest.mark.parametrize("case", CASES)
def test_the_layer_is_that_of_float64(tmp_path: Path, case: str, backend: str) -> None:
    arch, layout, parts, activation = CASES[case]
    fields = files.FIELDS | OWN.get(case, {})
    path = files.write(tmp_path / "m.gguf", layout(parts), arch=arch, fields=fields)
    moe = ktk.MoE.from_checkpoint(path, 0, backend)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(9, H, generator=generator).bfloat16()
    weights, ids = torch.rand(9, E, generator=generator).topk(files.TOP)
    got = moe(hidden, ids, weights).double().numpy()
    want = expected(parts, activation, hidden.double().numpy(), ids.tolist(), weights.numpy())
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    assert error <= PROMISED[backend]


def test_scales_beside_blocks_are_part_of_what_is_stored(tmp_path: Path) -> None:
    parts = scaled(files.experts("Q8_0"))
    path = files.write(tmp_path / "m.gguf", files.stacked(parts))
    moe = ktk.MoE.from_checkpoint(path, 0, "LLAMAFILE", shards=2)
    assert moe.format == moe.down_format == ktk.Format("q8_0")
    for part, got in zip(files.PARTS, moe.unpack_expert(3), strict=True):
        blocks = parts[part].values[3].astype(np.float32)
        np.testing.assert_array_equal(got, blocks * parts[f"{part}_scale"].data[3])
    blocks = parts["gate"].data[0], parts["up"].data[0], parts["down"].data[0]
    for scale in (np.ones(2, np.float32), np.ones(1, np.int8)):
        with pytest.raises(ValueError, match="up_scale must be one float32 for a whole matrix"):
            moe.load_expert(0, *blocks, given=moe.format, up_scale=scale)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A layer whose experts have 3.3 MB each, as they are stored."""
    fields = {**files.FIELDS, "embedding_length": SIZE, "expert_feed_forward_length": SIZE}
    stack = files.tensor((E, SIZE, SIZE), "Q8_0", 1)
    path = tmp_path_factory.mktemp("large") / "m.gguf"
    return files.write(path, files.stacked(dict.fromkeys(files.PARTS, stack)), fields=fields)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "kept"),
    [("LLAMAFILE", 0), ("BF16", 0), ("BF16", 3)],
    ids=["LLAMAFILE", "BF16", "BF16-and-three-leak"],
)
def test_loading_takes_the_packed_layer_and_two_experts_at_most(
    large: Path, backend: str, kept: int
) -> None:
    """Files are read, not mapped: what is stored as it is given goes through the caches of cores.

    What is decoded to f32 first is there before it is packed, and one expert is read meanwhile. Of
    the last, that is before it is packed; until then it is beside what it is decoded from.
    """
    taken = loading_memory.measured(large, backend, kept)
    layer, stored = taken["layer"], 3 * SIZE * SIZE * 34 // 32
    decoded = 3 * SIZE * SIZE * 4
    most = layer
    if backend == "BF16":
        most = layer - layer // E + 2 * decoded + stored
    slack = 2**19  # objects of Python, the heads of blocks, and rows that workers read
    if kept:
        assert taken["most"] > layer + kept * decoded > most + slack
    else:
        assert taken["most"] < most + slack
        assert layer <= taken["end"] < layer + slack


@pytest.mark.slow
def test_the_demo_runs_a_split_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = files.experts("Q8_0", down="Q5_1")
    tensors = {**files.stacked(parts, 0), **files.stacked(parts, 1)}
    path = files.write(tmp_path / "m.gguf", tensors, shard_tensors=4)
    rows = run_demo(checkpoint=path, layer=1, names=["BF16"])
    assert rows
    assert all(0 < row.error <= PROMISED["BF16"] for row in rows)
    assert "Q8_0, Q5_1, in layers 0-1" in capsys.readouterr().out
