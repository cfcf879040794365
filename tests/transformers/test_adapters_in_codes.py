"""Adapters of experts in any backend's codes are those of the same experts as floats.

The other side is transformers and PEFT alone: experts that have the values of the codes, `lora_A`
and `lora_B` by `target_parameters`, and autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf_model
import pytest
import quantized
import torch
import training
from gguf import GGMLQuantizationType as Type
from tiny import EXPERTS, FAMILIES, float32, logits, recorded, routed_as, tokens
from training import (
    act_error,
    forward_error,
    gradients,
    off_by,
    off_by_token,
    packed,
    randomize,
    skipping_what_cannot_run_here,
)

import ktk
import ktk.sft
import ktk.transformers
from ktk.transformers.packed import packed_modules

peft = pytest.importorskip("peft")
same_draws = training.same_draws
RANK = 4
# Writes a model; returns it with packed experts, and in float32 with the values of their codes.
Pair = Callable[[Path], tuple[Any, Any]]


def _while_loading(backend: str) -> Pair:
    """Pack what is published in bf16; what came of it tells the layer itself."""

    def make(folder: Path) -> tuple[Any, Any]:
        FAMILIES["qwen3-moe"].save(folder)
        model = packed(folder, quantization_config=ktk.transformers.KtkConfig(backend))
        stock = float32(folder)
        for name, one in packed_modules(model).items():
            module = stock.get_submodule(name)
            for expert in range(one.moe.config.num_experts):
                gate, up, down = map(torch.from_numpy, one.moe.unpack_expert(expert))
                module.gate_up_proj.data[expert] = torch.cat([gate, up])
                module.down_proj.data[expert] = down
        return model, stock

    return make


def _stored(write: Pair) -> Pair:
    """Load codes as files have them; what they mean says who wrote them."""

    def make(folder: Path) -> tuple[Any, Any]:
        path, stock = write(folder)
        return ktk.transformers.load(path, dtype=torch.float32), stock

    return make


def _scheme(name: str) -> Pair:
    return _stored(lambda folder: quantized.qwen3(folder, name))


def _gguf(kind: Type) -> Pair:
    return _stored(lambda folder: gguf_model.write(folder, dense="f32", experts=kind))


# Who computes it, and how it is made.
PAIRS: dict[str, tuple[str, Pair]] = {
    "bf16": ("BF16", _while_loading("BF16")),
    "bf16, shorter": ("BF16Z", _while_loading("BF16Z")),
    "int8 while loading": ("AMXINT8", _while_loading("AMXINT8")),
    "int8 while loading, a BLAS": ("BLIS", _while_loading("BLIS")),
    "int8 while loading, Arm": ("KML", _while_loading("KML")),
    "int4 while loading": ("AMXINT4", _while_loading("AMXINT4")),
    "int8 by rows": ("AMXINT8", _scheme("int8 by rows")),
    "gptq": ("AMXINT4", _scheme("gptq")),
    "int4": ("RAWINT4", _scheme("int4")),
    "fp8 by blocks": ("FP8", _scheme("fp8 by blocks")),
    "mxfp8": ("FP8", _scheme("mxfp8")),
    "mxfp4": ("MXFP4", _scheme("mxfp4")),
    "nvfp4": ("MXFP4", _scheme("nvfp4")),
    "q8_0": ("LLAMAFILE", _gguf(Type.Q8_0)),
    "q4_k": ("LLAMAFILE", _gguf(Type.Q4_K)),
}


def test_no_backend_is_left_out() -> None:
    ours = {info.name for info in ktk.backends().values() if info.distribution == "ktk"}
    assert ours == {backend for backend, _ in PAIRS.values()}


def _made(name: str, folder: Path) -> tuple[Any, Any]:
    backend, make = PAIRS[name]
    with skipping_what_cannot_run_here():
        model, stock = make(folder)
    found = packed_modules(model).values()
    assert {one.moe.backend.name for one in found} == {backend}
    for one in model.parameters():
        one.requires_grad_(False)
    return model, stock


def _with_peft(stock: Any, model: Any, folder: Path) -> Any:
    """Save a model's adapters, and let PEFT put them beside stock experts."""
    ktk.sft.save_adapter(model, folder, "peft-fused")
    return peft.PeftModel.from_pretrained(stock, str(folder), is_trainable=True)


@pytest.mark.parametrize("name", PAIRS)
def test_trained_adapters_go_to_stock_transformers(name: str, tmp_path: Path) -> None:
    model, stock = _made(name, tmp_path)
    ids = tokens()
    optimizer = torch.optim.AdamW(ktk.sft.add_lora(model, rank=RANK, alpha=8), lr=2e-2)
    for _ in range(8):
        gradients(model, ids)
        optimizer.step()
    before = logits(stock, ids)
    stock = _with_peft(stock, model, tmp_path / "adapter")
    assert off_by_token(logits(model, ids), before) > 4 * forward_error(model)
    assert off_by_token(logits(model, ids), logits(stock, ids)) < forward_error(model)


@pytest.mark.parametrize("name", PAIRS)
def test_factors_have_the_gradients_of_stock_ones(name: str, tmp_path: Path) -> None:
    """Of the same tokens, sent to the same experts."""
    model, stock = _made(name, tmp_path)
    ids = tokens()
    with recorded(stock) as calls:
        logits(stock, ids)
    randomize(ktk.sft.add_lora(model, rank=RANK, alpha=8))
    stock = _with_peft(stock, model, tmp_path / "adapter")
    with routed_as(model, calls):
        got = gradients(model, ids)
    with routed_as(stock, calls):
        wanted = _apart(gradients(stock, ids))
    assert got.keys() == wanted.keys()
    assert len(got) == 2 * 6
    for factor, one in got.items():
        assert off_by(one, wanted[factor]) < _gradient_error(model), factor


def _gradient_error(model: Any) -> float:
    """Bound the relative error of a factor's gradient.

    It passes the 16 roundings to bf16 of `training.ROUNDED`, each 2^-9 as the root of the mean
    square, and hangs on what each layer of experts stores of activations twice: through the
    products of gate and up on the way back, once as a factor and once in a slope, and through what
    it is multiplied with. Roundings know nothing of each other, so their squares add up.
    """
    stored = sum(2 * (3 * act_error(one)) ** 2 for one in packed_modules(model).values())
    return float((16 * 2.0**-18 + stored) ** 0.5)


def _apart(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return PEFT's gradients by the names of ktk's factors.

    PEFT has one A for gate and up, and so twice the rank: ktk's stand one behind the other in it,
    and zeros of B, which have gradients, too, are none of ktk's. Those of down fill the rest up.
    """
    parts = {}
    for name, one in found.items():
        module, _, path = name.removeprefix("base_model.model.").partition(".experts.")
        joined, a = "base_layer" in path, "lora_A" in path
        if a:
            first, second = one.unflatten(0, (EXPERTS, 2, RANK)).unbind(1)
        else:
            first, second = one.unflatten(1, (2, RANK, EXPERTS)).permute(1, 3, 0, 2)
        if joined and not a:
            first, second = first.chunk(2, dim=1)[0], second.chunk(2, dim=1)[1]
        halves = {"gate": first, "up": second} if joined else {"down": first}
        for part, half in halves.items():
            parts[f"{module}.experts.{part}_lora_{'a' if a else 'b'}"] = half
    return parts
