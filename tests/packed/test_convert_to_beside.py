"""`ktk convert --to` decodes codes that are no experts, and loses nothing that is beside them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
import schemes
import torch
import written

from ktk.checkpoint.quantization import read_quantization
from ktk.checkpoint.safetensors.index import TensorIndex
from ktk.checkpoint.safetensors.single import find_matrix
from ktk.conversion.compressed import convert_checkpoint
from ktk.conversion.convert import convert
from ktk.errors import CheckpointError
from ktk.quantize import quantize
from ktk.testing import formats

STEM = "model.layers.0.self_attn.q_proj"
ROUTER = "model.layers.0.mlp.gate"
SIZES = (4, 128, 128)
SHAPE = (128, 128)
Made = tuple[schemes.Tensors, np.ndarray]


def by_kit(name: str) -> Made:
    """A matrix in a scheme of tests/unit/schemes.py."""
    fmt, make, _ = schemes.SCHEMES[name]
    rng = np.random.default_rng(3)
    source = formats.make_source(fmt, rng.standard_normal(SHAPE).astype(np.float32), rng)
    if source.zero is not None:
        source = schemes.clipped(source, 1, 15)
    return make(source), source.values


def awq() -> Made:
    rng = np.random.default_rng(4)
    values = rng.standard_normal(SHAPE).astype(np.float32)
    source = schemes.clipped(formats.make_source(schemes.U4_ZERO, values, rng), 0, 15)
    return schemes.awq(source), source.values


def desc_act() -> Made:
    one = written.random(SHAPE, 4, 32, np.random.default_rng(5), zeros=True, sort=True)
    return written.gptq(one, 4), one.values


def torchao() -> Made:
    codes = torch.arange(128 * 128).reshape(SHAPE).to(torch.int8)
    made = {"._weight_qdata": codes, "._weight_scale": torch.full((128, 1), 0.25)}
    made["._weight_zero_point"] = torch.full((128, 1), 3, dtype=torch.int8)
    return made, ((codes.double() - 3) / 4).numpy()


def in_floats(made: Made, name: str, dtype: torch.dtype) -> Made:
    """The same bytes, called floats: bnb_4bit_quant_storage, and view_as_float of HQQ."""
    tensors, values = made
    data = tensors[name]
    flat = data.reshape(-1).view(dtype)
    shaped = flat.unsqueeze(1) if name == ".weight" else flat.reshape(len(data), -1)
    return {**tensors, name: shaped}, values


def four_bits(kind: str, *, nested: bool = False) -> Made:
    return written.four_bits(kind, SHAPE, 64, nested=nested)


def hqq(bits: int, axis: int) -> Made:
    return written.hqq(SHAPE, bits, axis, 64, torch.bfloat16)


STORED: dict[str, tuple[Any, dict[str, Any]]] = {
    **{name: (partial(by_kit, name), row[2]) for name, row in schemes.SCHEMES.items()},
    "awq": (awq, schemes.AWQ_CONFIG),
    "desc_act": (desc_act, {**schemes.GPTQ_CONFIG, "desc_act": True}),
    "torchao": (torchao, {"quant_method": "torchao"}),
    "LLM.int8": (lambda: written.llm_int8(SHAPE), written.BNB_8BIT),
    "nf4": (lambda: four_bits("nf4", nested=True), written.BNB_4BIT),
    "fp4": (lambda: four_bits("fp4"), written.BNB_4BIT),
    "HQQ": (lambda: hqq(4, 1), written.HQQ),
    "HQQ by columns": (lambda: hqq(8, 0), written.HQQ),
    **{
        f"{kind} in {dtype}": (
            partial(lambda kind, dtype: in_floats(four_bits(kind), ".weight", dtype), kind, dtype),
            written.BNB_4BIT,
        )
        for kind in ("nf4", "fp4")
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
    },
    "HQQ in floats": (lambda: in_floats(hqq(4, 1), ".W_q", torch.bfloat16), written.HQQ),
}


@pytest.mark.parametrize("name", STORED)
def test_every_scheme_is_decoded_with_all_its_tensors(name: str, tmp_path: Path) -> None:
    make, config = STORED[name]
    tensors, values = make()
    source = models.write(tmp_path / "source", SIZES, quantization_config=config)
    beside = {".bias": torch.ones(128)}
    beside |= {
        suffix: torch.ones(1)
        for suffix in (".input_scale", ".k_scale", ".output_scale", ".kv_scale")
    }
    models.put(source, STEM, {**tensors, **beside})
    convert_checkpoint(source, tmp_path / "to", to="fp8")
    found = models.tensors(tmp_path / "to")
    assert {one for one in found if one.startswith(STEM)} == {f"{STEM}.weight", f"{STEM}.bias"}
    want = torch.from_numpy(np.asarray(values)).float().bfloat16()
    assert torch.equal(found[f"{STEM}.weight"], want)


def row_wise(folder: Path, stem: str, rows: int, beside: schemes.Tensors) -> Path:
    """Write a model with a matrix in FP8 by rows, and others beside it."""
    weight = torch.randn(rows, 128, generator=torch.Generator().manual_seed(0))
    made = quantize(weight, "e4m3-f32-row")
    assert made.scale is not None
    codes = {".weight": made.data.view(torch.float8_e4m3fn), ".weight_scale": made.scale}
    return models.put(models.write(folder, SIZES), stem, {**codes, **beside})


@pytest.mark.parametrize(
    "suffix",
    [
        ".pre_quant_scale",
        ".lora_A.weight",
        ".lora_B.bias",
        ".weight_zero_point",
        ".weight_scale_2",
        ".smooth_bias",
    ],
)
def test_what_nobody_knows_beside_codes_is_refused(suffix: str, tmp_path: Path) -> None:
    source = row_wise(tmp_path / "source", STEM, 128, {suffix: torch.ones(128)})
    message = (
        rf"^tensor {STEM}{suffix} in .*one\.safetensors is beside the matrix {STEM}, which is "
        "stored as fp8 by rows, and nobody knows what it does to that"
    )
    with pytest.raises(CheckpointError, match=message):
        convert_checkpoint(source, tmp_path / "to", to="int4")
    assert not (tmp_path / "to").exists()


def test_biases_of_experts_are_named(tmp_path: Path) -> None:
    source = models.write(tmp_path / "source", SIZES)
    for expert in range(SIZES[0]):
        stem = f"model.layers.0.mlp.experts.{expert}.down_proj"
        weight = models.tensors(source)[f"{stem}.weight"]
        models.put(source, stem, {".weight": weight, ".bias": torch.ones(len(weight))})
    message = (
        r"^tensor model\.layers\.0\.mlp\.experts\.0\.down_proj\.bias in .* is a bias of experts"
    )
    with pytest.raises(CheckpointError, match=message):
        convert_checkpoint(source, tmp_path / "to", to="int4")
    convert(source, tmp_path / "packed", backend="BF16")


def test_what_a_router_in_codes_adds_to_scores_is_kept(tmp_path: Path) -> None:
    bias = torch.arange(4.0)
    source = row_wise(tmp_path / "source", ROUTER, 4, {".e_score_correction_bias": bias})
    convert_checkpoint(source, tmp_path / "to", to="int4")
    found = models.tensors(tmp_path / "to")
    assert torch.equal(found[f"{ROUTER}.e_score_correction_bias"], bias)
    assert found[f"{ROUTER}.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("make", "left", "data"),
    [
        (lambda: four_bits("nf4"), ".weight.quant_map", ".weight"),
        (lambda: hqq(4, 1), ".zero", ".W_q"),
    ],
    ids=["nf4", "HQQ"],
)
def test_codes_in_floats_that_lack_something_are_refused(
    make: Any, left: str, data: str, tmp_path: Path
) -> None:
    tensors, _ = in_floats(make(), data, torch.bfloat16)
    del tensors[left]
    source = models.put(models.write(tmp_path / "source", SIZES), STEM, tensors)
    message = rf"{STEM}{data} in .* holds codes in elements of type BF16, and ktk knows no scheme"
    with pytest.raises(CheckpointError, match=message):
        convert_checkpoint(source, tmp_path / "to", to="int4")


# --- several widths -----------------------------------------------------------------------------


def widths(group: int) -> dict[str, Any]:
    """What config.json says of experts of 4 bits and attention of 8."""
    attention = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    said = {
        "experts": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32},
        "self_attn": {"num_bits": 8, "type": "int", **attention},
    }
    groups = {
        name: {"targets": [f"re:.*{name}.*"], "weights": {**weights, "symmetric": True}}
        for name, weights in said.items()
    }
    return {"quant_method": "compressed-tensors", "config_groups": groups}


def packed(group: int) -> Made:
    one = written.random(SHAPE, 8, group, np.random.default_rng(6))
    made = {".weight_packed": written.stream(one.codes, 8), ".weight_scale": one.scale}
    return {**made, ".weight_shape": torch.tensor(SHAPE)}, one.values


@pytest.mark.parametrize("group", [0, 32])
def test_the_shape_of_a_matrix_tells_its_width(group: int, tmp_path: Path) -> None:
    tensors, values = packed(group)
    config = {"quantization_config": widths(group)}
    source = models.put(models.write(tmp_path / "source", SIZES, **config), STEM, tensors)
    with TensorIndex(source) as index:
        matrix = find_matrix(index, STEM, read_quantization(config))
        assert matrix is not None
        assert (matrix.shape, matrix.layout.bits, matrix.layout.group) == (SHAPE, 8, group)
    convert_checkpoint(source, tmp_path / "to", to="int4")
    found = models.tensors(tmp_path / "to")[f"{STEM}.weight"]
    assert torch.equal(found, torch.from_numpy(values).float().bfloat16())


@pytest.mark.parametrize("group", [0, 32])
def test_widths_that_nothing_tells_are_refused(group: int, tmp_path: Path) -> None:
    tensors, _ = packed(group)
    del tensors[".weight_shape"]
    source = models.write(tmp_path / "source", SIZES, quantization_config=widths(group))
    models.put(source, STEM, tensors)
    message = (
        rf"^tensor {STEM}\.weight_packed in .*one\.safetensors holds codes of a width that nothing "
        r"tells: config\.json has several, and no weight_shape is beside it$"
    )
    with pytest.raises(CheckpointError, match=message):
        convert_checkpoint(source, tmp_path / "to", to="int4")


def test_a_link_to_nothing_is_no_file_that_may_be_left_out(tmp_path: Path) -> None:
    """As the hub's cache has them where a download ended early."""
    source = models.write(tmp_path / "source", SIZES)
    (source / "tokenizer.model").symlink_to(tmp_path / "blobs" / "tokenizer")
    with pytest.raises(CheckpointError, match=r"tokenizer\.model is missing, though a link leads"):
        convert_checkpoint(source, tmp_path / "to", to="fp8")
    assert not (tmp_path / "to").exists()
