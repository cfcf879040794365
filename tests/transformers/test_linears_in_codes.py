"""Dense layers that a checkpoint stores in codes are computed in these."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quantized
import schemes
import tiny
import torch
import written
from dense_layers import check_linears
from safetensors.torch import load_file

import ktk
import ktk.transformers
from ktk.checkpoint.config import read_config
from ktk.checkpoint.quantization import Quantization
from ktk.checkpoint.safetensors.index import TensorIndex
from ktk.checkpoint.safetensors.single import find_matrix
from ktk.errors import CheckpointError
from ktk.testing import formats
from ktk.transformers import codes, modules
from ktk.transformers.dense import packed_linears

# How attention is stored, beside experts stored so, and who computes it.
CODES = {
    **dict.fromkeys(("fp8 by blocks", "fp8 by rows"), "FP8"),
    **dict.fromkeys(("int4", "gptq, symmetric"), "RAWINT4"),
    "mxfp4": "MXFP4",
    "int8 by rows": "AMXINT8",
    "gptq": "AMXINT4",
    "awq": "AMXINT4",
}


BF16 = "BF16", torch.bfloat16
HQQ_OPTIONS: dict[str, Any] = {"bits": 4, "group": 32, "dtype": torch.float16}


def in_codes(folder: Path, name: str) -> tuple[Path, Any]:
    """Write a model with attention and routers in codes, too; return the folder and the model."""
    most = 15 if name == "awq" else 16
    awq = schemes.U4_ZERO, schemes.awq, schemes.AWQ_CONFIG
    fmt, make, quantization = awq if name == "awq" else schemes.SCHEMES[name]
    _, exact = quantized.rewritten(folder, fmt, make, quantization, most=most)
    tensors = load_file(folder / "model.safetensors")
    rng = np.random.default_rng(1)
    for tensor in [one for one in tensors if one.endswith(("_proj.weight", "mlp.gate.weight"))]:
        if ".experts." in tensor:
            continue
        source = formats.make_source(fmt, tensors.pop(tensor).float().numpy(), rng)
        source = quantized.in_four_bits(source, most)
        stem = tensor.removesuffix(".weight")
        tensors |= {stem + suffix: one for suffix, one in make(source).items()}
        exact.get_parameter(tensor).data = torch.from_numpy(source.values).float()
    quantized.rewrite(folder, tensors, quantization)
    return folder, exact


@pytest.mark.slow
@pytest.mark.parametrize("name", CODES)
def test_codes_of_a_checkpoint_are_computed_as_they_are_stored(name: str, tmp_path: Path) -> None:
    folder, exact = in_codes(tmp_path, name)
    model = ktk.transformers.load(folder, dtype=torch.float32)
    layers = packed_linears(model)
    assert {one.linear.backend.name for one in layers.values()} == {CODES[name]}
    assert len(layers) == 8
    for layer, one in layers.items():
        weight = exact.get_submodule(layer).weight
        # f32 multiplies a code, and maybe its zero point, with the scale.
        allowed = 2**-20 * weight.abs().amax(1, keepdim=True)
        assert ((torch.from_numpy(one.linear.unpack()) - weight).abs() <= allowed).all()
    for number in range(2):  # routers are floats, whatever they were
        gate = f"model.layers.{number}.mlp.gate.weight"
        torch.testing.assert_close(
            model.get_parameter(gate), exact.get_parameter(gate), rtol=2**-20, atol=2**-24
        )
    check_linears(model, tiny.tokens())


def test_a_head_that_is_tied_to_an_embedding_in_codes_is_decoded_with_it(tmp_path: Path) -> None:
    folder, _ = in_codes(tmp_path, "int4")
    fmt, make, quantization = schemes.SCHEMES["int4"]
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    values = tensors.pop("model.embed_tokens.weight").float().numpy()
    source = formats.make_source(fmt, values, np.random.default_rng(0))
    for suffix, one in make(quantized.in_four_bits(source, 16)).items():
        tensors[f"model.embed_tokens{suffix}"] = one
    quantized.rewrite(folder, tensors, quantization)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    model = ktk.transformers.load(folder, dtype=torch.float32)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    torch.testing.assert_close(
        model.lm_head.weight, torch.from_numpy(source.values).float(), rtol=2**-20, atol=2**-24
    )


def test_codes_become_others_if_that_is_asked_for(tmp_path: Path) -> None:
    folder, _ = in_codes(tmp_path, "fp8 by blocks")
    model = ktk.transformers.load(folder, linears="AMXINT8")
    assert {one.linear.backend.name for one in packed_linears(model).values()} == {"AMXINT8"}


DESC_ACT = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": False}


def desc_act(size: tuple[int, int]) -> tuple[schemes.Tensors, np.ndarray]:
    one = written.random(size, 4, 32, np.random.default_rng(sum(size)), zeros=True, sort=True)
    return written.gptq(one, 4), one.values


#: How packages store all of a model, who computes dense layers of it, and what of, exactly.
PACKAGES: dict[str, tuple[Any, Any, str, torch.dtype]] = {
    "nf4": (partial(written.four_bits, "nf4", block=64, nested=True), written.BNB_4BIT, *BF16),
    "fp4": (partial(written.four_bits, "fp4", block=64, nested=False), written.BNB_4BIT, *BF16),
    "desc_act": (desc_act, DESC_ACT, "AMXINT4", torch.float32),
    "LLM.int8": (written.llm_int8, written.BNB_8BIT, "AMXINT8", torch.float32),
    "HQQ": (partial(written.hqq, axis=1, **HQQ_OPTIONS), written.HQQ, "AMXINT4", torch.float32),
    "HQQ by columns": (partial(written.hqq, axis=0, **HQQ_OPTIONS), written.HQQ, *BF16),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PACKAGES)
def test_what_packages_write_needs_none_of_them(
    name: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write, config, backend, dtype = PACKAGES[name]
    folder, exact = quantized.written_as(tmp_path, write, config)
    monkeypatch.setattr(modules, "_said", set())
    with caplog.at_level("WARNING"):
        model = ktk.transformers.load(folder, dtype=torch.float32)
    layers = packed_linears(model)
    assert {one.linear.backend.name for one in layers.values()} == {backend}
    assert len(layers) == 8
    for layer, one in layers.items():
        want = exact.get_submodule(layer).weight.to(dtype).float()
        np.testing.assert_array_equal(one.linear.unpack(), want.detach())
    said = "decoded and rounded for BF16: no backend has such codes" in caplog.text
    assert said == (backend == "BF16")
    check_linears(model, tiny.tokens())


def test_what_is_said_of_codes_is_said_to_experts_and_dense_layers(tmp_path: Path) -> None:
    said = {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"}
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "hidden_size": 64, "d_ff": 32}
    nothing = {"quantization_config": None}
    for entries in (
        {**sizes, "quantization_config": said, "text_config": nothing},
        {**sizes, **nothing, "text_config": {"quantization_config": said}},
        {"thinker_config": {**sizes, "quantization_config": said, "text_config": nothing}},
        {**sizes, "quantization_config": {"bits": 8}, "llm_config": {"quantization_config": said}},
    ):
        (tmp_path / "config.json").write_text(json.dumps(entries))
        found = codes._quantization(tmp_path)
        assert found == read_config(tmp_path).quantization
        assert (found.bits, found.zero_offset) == (4, 0)


def test_sizes_that_are_none_are_named(tmp_path: Path) -> None:
    folder, _ = quantized.written_as(tmp_path, *PACKAGES["HQQ"][:2])
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj"
    tensors[f"{name}.shape"] = torch.tensor([-1, 64])
    quantized.rewrite(folder, tensors, written.HQQ)
    with (
        TensorIndex(folder) as index,
        pytest.raises(CheckpointError, match=r"q_proj.shape .* is \[-1, 64\], which are no rows"),
    ):
        find_matrix(index, name, Quantization())
