"""bitsandbytes' files mean what its formats do: nf4, fp4, double quantisation and LLM.int8.

They are written here by the description of the formats, and by bitsandbytes where it is installed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from meanings import F32, assert_loads, assert_means, save
from schemes import NAMES, SIZES, E
from written import BNB_4BIT, BNB_8BIT, TABLES, four_bits, json_tensor, llm_int8

import ktk
from ktk import Format
from ktk.checkpoint import describe, open_checkpoint
from ktk.errors import CheckpointError


def all_of(kind: str, block: int = 64, *, nested: bool = False) -> tuple[Any, Any]:
    made, values = {}, {}
    for part, size in SIZES.items():
        for e in range(E):
            made[part, e], values[part, e] = four_bits(kind, size, block, nested=nested)
    return made, values


@pytest.mark.parametrize("nested", [False, True], ids=["", "nested"])
@pytest.mark.parametrize("block", [64, 4096])
@pytest.mark.parametrize("kind", TABLES)
def test_four_bits(tmp_path: Path, kind: str, block: int, nested: bool) -> None:
    made, values = all_of(kind, block, nested=nested)
    save(tmp_path, made, BNB_4BIT)
    assert_means(tmp_path, values, F32)
    assert_loads(tmp_path, values, "BF16", torch.bfloat16)
    assert str(describe(tmp_path)).endswith(f"{kind} by bitsandbytes, in layers 3")


def test_a_backend_that_is_named_gets_the_values(tmp_path: Path) -> None:
    made, values = all_of("nf4")
    save(tmp_path, made, BNB_4BIT)
    moe = ktk.MoE.from_checkpoint(tmp_path, 3, "AMXINT8")
    for e in range(E):
        for part, matrix in zip(SIZES, moe.unpack_expert(e), strict=True):
            step = np.abs(values[part, e]).max(1, keepdims=True) / 127
            # Half a step, and the rounding of the scale.
            assert (np.abs(matrix - values[part, e]) <= step * (0.5 + 2.0**-16)).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bytes_may_be_called_floats(tmp_path: Path, dtype: torch.dtype) -> None:
    """quant_storage: what FSDP shards."""
    made, values = all_of("nf4")
    for tensors in made.values():
        tensors[".weight"] = tensors[".weight"].flatten().view(dtype).unsqueeze(1)
    save(tmp_path, made, BNB_4BIT)
    assert_means(tmp_path, values, F32)


def test_llm_int8_is_stored_as_it_is(tmp_path: Path) -> None:
    made, values = {}, {}
    for part, size in SIZES.items():
        for e in range(E):
            made[part, e], values[part, e] = llm_int8(size)
    save(tmp_path, made, BNB_8BIT)
    assert_means(tmp_path, values, Format("i8", "f32", "none", 1, 0))
    assert_loads(tmp_path, values, "AMXINT8", torch.float32)


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught, open_checkpoint(folder) as checkpoint:
        checkpoint.layer(3).expert(1)
    message = str(caught.value)
    assert message.startswith(f"tensor {NAMES['up'].format(e=1)}.weight in {folder}")
    return message


def test_int8_for_one_kind_of_gpu_is_refused_with_a_cure(tmp_path: Path) -> None:
    made = {
        (part, e): {
            ".weight": torch.zeros(n, k, dtype=torch.int8),
            ".SCB": torch.ones(n),
            ".weight_format": torch.tensor(2 * e if part == "up" else 0, dtype=torch.uint8),
        }
        for part, (n, k) in SIZES.items()
        for e in range(E)
    }
    save(tmp_path, made, {"quant_method": "bitsandbytes"})
    assert "is laid out as col_turing, for one kind of GPU; load the model with" in refusal(
        tmp_path
    )


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"shape": [1, 2]}, "is a matrix of [1, 2], but config.json means [160, 192]"),
        ({"blocksize": 0}, "blocksize is 0, expected an integer from 1"),
        ({"blocksize": 128}, "has 480 scales for 30720 values in blocks of 128"),
        ({"nested_offset": "no"}, "nested_offset is 'no', expected a number"),
    ],
)
def test_what_the_state_contradicts_is_named(
    tmp_path: Path, changes: dict[str, Any], wanted: str
) -> None:
    made, _ = all_of("nf4")
    name = ".weight.quant_state.bitsandbytes__nf4"
    entries = json.loads(made["up", 1][name].numpy().tobytes())
    made["up", 1][name] = json_tensor({**entries, **changes})
    save(tmp_path, made, BNB_4BIT)
    assert wanted in refusal(tmp_path)


def test_half_of_the_codes_is_refused(tmp_path: Path) -> None:
    made, _ = all_of("nf4")
    made["up", 1][".weight"] = made["up", 1][".weight"][::2].clone()
    save(tmp_path, made, BNB_4BIT)
    assert "has 15360 codes, and is a matrix of [160, 192]" in refusal(tmp_path)


def test_scales_that_are_nested_in_part_are_refused(tmp_path: Path) -> None:
    made, _ = all_of("nf4", nested=True)
    del made["up", 1][".weight.nested_absmax"]
    save(tmp_path, made, BNB_4BIT)
    assert "has an absmax that is nested in part" in refusal(tmp_path)


@pytest.mark.parametrize("nested", [False, True], ids=["", "nested"])
@pytest.mark.parametrize("kind", TABLES)
def test_what_bitsandbytes_writes_itself(tmp_path: Path, kind: str, nested: bool) -> None:
    functional = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes").functional
    made, values = {}, {}
    for part, size in SIZES.items():
        for e in range(E):
            weight = torch.randn(size, generator=torch.Generator().manual_seed(e))
            data, state = functional.quantize_4bit(
                weight, compress_statistics=nested, quant_type=kind
            )
            made[part, e] = {".weight": data} | {
                f".weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()
            }
            # A row to a block: where blocks go over the ends of rows, its kernel for CPUs decodes
            # other values than its kernels for GPUs.
            state.shape = torch.Size((weight.numel() // state.blocksize, state.blocksize))
            values[part, e] = functional.dequantize_4bit(data, state).reshape(size).numpy()
    save(tmp_path, made, BNB_4BIT)
    assert_means(tmp_path, values, F32)


def test_the_int8_of_bitsandbytes_itself(tmp_path: Path) -> None:
    functional = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes").functional
    made, values = {}, {}
    for part, size in SIZES.items():
        for e in range(E):
            weight = torch.randn(size, generator=torch.Generator().manual_seed(e)).half()
            data, scale, _ = functional.int8_vectorwise_quant(weight)
            made[part, e] = {".weight": data, ".SCB": scale}
            values[part, e] = functional.int8_vectorwise_dequant(data, scale).numpy()
    save(tmp_path, made, {"quant_method": "bitsandbytes"})
    with open_checkpoint(tmp_path) as checkpoint:
        for e in range(E):
            for part, matrix in checkpoint.layer(3).expert(e, SIZES).matrices.items():
                # It divides by 127 in another order: three roundings to f32 differ.
                np.testing.assert_allclose(matrix.data, values[part, e], rtol=3 * 2.0**-23)
