"""Without a name, the format of the weights decides which backend computes them."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ktk
from ktk import Format, names
from ktk.checkpoint import open_checkpoint
from ktk.errors import BackendNotFound, CheckpointFormatError
from ktk.loading import default, default_backend
from ktk.loading.route import taken
from ktk.quantize import Quantized, quantize

E, H, I = 2, 256, 128  # noqa: E741 - the names the table of families uses
SYMMETRIC = {"config_groups": {"all": {"weights": {"num_bits": 4, "symmetric": True}}}}
COMPRESSED = {"quant_method": "compressed-tensors"}


def plain(dtype: torch.dtype) -> Any:
    return lambda name, weight: {f"{name}.weight": weight.to(dtype)}


def fp8(scale: str, fmt: Format) -> Any:
    def make(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        made = quantize(weight, fmt)
        assert made.scale is not None
        return {
            f"{name}.weight": made.data.view(torch.float8_e4m3fn),
            f"{name}.{scale}": made.scale,
        }

    return make


def mxfp4(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    made = quantize(weight, Format("e2m1", "ue8m0", "none", 1, 32))
    assert made.scale is not None
    return {f"{name}.weight": made.data.view(torch.int8), f"{name}.scale": made.scale}


def words(made: Quantized) -> torch.Tensor:
    return made.data.contiguous().view(torch.int32)


def compressed(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    made = quantize(weight, Format("u4", "bf16", "none", 1, 32))
    assert made.scale is not None
    return {f"{name}.weight_packed": words(made), f"{name}.weight_scale": made.scale}


def gptq(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Zero points of 7, stored minus one, in every code."""
    made = quantize(weight, Format("u4", "f16", "none", 1, 128))
    assert made.scale is not None
    groups, n = made.scale.shape[1], made.scale.shape[0]
    return {
        f"{name}.qweight": words(made).T.contiguous(),
        f"{name}.scales": made.scale.T.contiguous(),
        f"{name}.qzeros": torch.full((groups, n // 8), 0x66666666, dtype=torch.int32),
    }


def int8(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    made = quantize(weight, Format("i8", "f32", "none", 1, 0))
    assert made.scale is not None
    return {f"{name}.weight": made.data, f"{name}.weight_scale": made.scale}


CASES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "bf16": (plain(torch.bfloat16), {}, "BF16"),
    "f16": (plain(torch.float16), {}, "BF16"),
    "f32": (plain(torch.float32), {}, "BF16"),
    "fp8-block": (
        fp8("weight_scale_inv", Format("e4m3", "f32", "none", 128, 128)),
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        "FP8",
    ),
    "fp8-channel": (fp8("weight_scale", Format("e4m3", "f32", "none", 1, 0)), COMPRESSED, "FP8"),
    "mxfp8": (
        fp8("weight_scale_inv", Format("e4m3", "ue8m0", "none", 1, 32)),
        {"quant_method": "mxfp8"},
        "FP8",
    ),
    "mxfp4": (mxfp4, {}, "MXFP4"),
    "int4": (compressed, COMPRESSED | SYMMETRIC, "RAWINT4"),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": 128}, "AMXINT4"),
    "int8": (int8, COMPRESSED, "AMXINT8"),
}


QWEN = ("gate_proj", "up_proj", "down_proj")
MIXTRAL = ("w1", "w3", "w2")


def write(
    folder: Path,
    case: str,
    stem: str = "model.layers.0.mlp.experts",
    parts: tuple[str, str, str] = QWEN,
    nested: tuple[str, ...] = (),
    **entries: Any,
) -> str:
    """Write a layer in a format; returns the backend that should compute it."""
    make, quantization, expected = CASES[case]
    tensors: dict[str, torch.Tensor] = {}
    torch.manual_seed(3)
    for e in range(E):
        for part, shape in zip(parts, ((I, H), (I, H), (H, I)), strict=True):
            tensors |= make(f"{stem}.{e}.{part}", torch.randn(shape) / 16)
    save_file(tensors, folder / "model.safetensors")
    config: dict[str, Any] = {
        "model_type": "qwen3_moe",
        "num_experts": E,
        "num_experts_per_tok": 1,
        "hidden_size": H,
        "moe_intermediate_size": I,
        **entries,
    }
    if quantization:
        config["quantization_config"] = quantization
    for name in reversed(nested):
        config = {"model_type": "outer", "hidden_size": 7, name: config}
    (folder / "config.json").write_text(json.dumps(config))
    return expected


@pytest.mark.parametrize("case", CASES)
def test_the_format_decides(tmp_path: Path, case: str, caplog: pytest.LogCaptureFixture) -> None:
    expected = write(tmp_path, case)
    with caplog.at_level(logging.INFO, logger="ktk"):
        moe = ktk.MoE.from_checkpoint(tmp_path, 0)
    assert moe.backend.name == expected
    assert f"is computed by {expected}" in caplog.text
    assert_stores(moe, tmp_path, 0, rounded=case in ("f16", "f32"))


def assert_stores(moe: ktk.MoE, folder: Path, number: int, *, rounded: bool = False) -> None:
    """The layer must hold exactly what is stored; f32 and f16 are rounded to bf16."""
    with open_checkpoint(folder) as checkpoint:
        layer = checkpoint.layer(number)
        for e in range(E):
            wanted = layer.values(e).arrays()
            for part, got in zip(("gate", "up", "down"), moe.unpack_expert(e), strict=True):
                close = wanted[part].float()
                if rounded:
                    close = close.bfloat16().float()
                # unpack_expert multiplies by the scale in f32.
                torch.testing.assert_close(torch.from_numpy(got), close, rtol=2**-22, atol=0)


# Published files that transformers does not write: names, nesting and format together.
PUBLISHED: dict[str, dict[str, Any]] = {
    "kimi-k2-thinking": {"case": "int4", "stem": "model.layers.5.mlp.experts"},
    "kimi-k2.5": {
        "case": "int4",
        "stem": "language_model.model.layers.5.mlp.experts",
        "nested": ("text_config",),
    },
    "deepseek-v3": {"case": "fp8-block", "stem": "model.layers.5.mlp.experts"},
    "deepseek-v4": {
        "case": "mxfp4",
        "stem": "layers.5.ffn.experts",
        "parts": MIXTRAL,
        "swiglu_limit": 10.0,
    },
    "minimax-m2": {
        "case": "fp8-block",
        "stem": "model.layers.5.block_sparse_moe.experts",
        "parts": MIXTRAL,
    },
    "minimax-m3": {
        "case": "mxfp8",
        "stem": "language_model.model.layers.5.block_sparse_moe.experts",
        "parts": MIXTRAL,
        "nested": ("text_config",),
        "hidden_act": "swigluoai",
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
    "mistral": {"case": "bf16", "stem": "layers.5.experts", "parts": MIXTRAL},
    "qwen3-omni": {
        "case": "bf16",
        "stem": "thinker.model.layers.5.mlp.experts",
        "nested": ("thinker_config", "text_config"),
    },
    "qwen3-gptq": {"case": "gptq", "stem": "model.layers.5.mlp.experts"},
}


@pytest.mark.parametrize("model", PUBLISHED)
def test_published_files_are_loaded_without_a_name(tmp_path: Path, model: str) -> None:
    expected = write(tmp_path, **PUBLISHED[model])
    loaded = ktk.Model.from_checkpoint(tmp_path)
    assert loaded.layers == (5,)
    assert loaded[5].backend.name == expected
    assert_stores(loaded[5], tmp_path, 5)
    config = loaded[5].config
    activations = {"minimax-m3": ("swigluoai", 7.0), "deepseek-v4": ("silu", 10.0)}
    wanted = activations.get(model, ("silu", None))
    assert (config.activation, config.activation_limit) == wanted


def test_the_next_of_a_list_is_taken_where_the_first_refuses(tmp_path: Path) -> None:
    write(tmp_path, "gptq")
    assert names.PREFERRED["u4"] == ("RAWINT4", "AMXINT4")
    with open_checkpoint(tmp_path) as checkpoint:
        layer = checkpoint.layer(0)
        with pytest.raises(CheckpointFormatError):
            taken(layer, ktk.load_backend("RAWINT4"))
        assert default_backend(layer).name == "AMXINT4"


def test_a_format_that_no_backend_takes_is_named_with_all_reasons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "mxfp4")
    monkeypatch.setattr(default, "PREFERRED", {"e2m1": ("RAWINT4", "MISSING")})
    monkeypatch.setattr(default, "DECODED", ())
    with open_checkpoint(tmp_path) as checkpoint, pytest.raises(CheckpointFormatError) as caught:
        default_backend(checkpoint.layer(0))
    for part in ("layer 0 is stored as e2m1", "RAWINT4: ", "MISSING: no backend"):
        assert part in str(caught.value)
    _, _, able = str(caught.value).partition(
        ". Named by backend=, any of these decodes and quantises the weights: "
    )
    assert "AMXINT8" in able.split(", ")
    for name in able.split(", "):
        assert ktk.MoE.from_checkpoint(tmp_path, 0, name).backend.name == name
    with pytest.raises(BackendNotFound):
        ktk.load_backend("MISSING")
