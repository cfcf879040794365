"""Quantised checkpoints as others write them, against transformers' own blocks in float64.

compressed-tensors writes its formats itself. Fine-grained FP8, GPTQ, AWQ and the blocks of gpt-oss
are written by programs that need a GPU or a whole model: their tensors are made here by the
published packing, and gpt-oss is decoded by transformers. The oracle is always the block of
transformers with the weights that the checkpoint means, in float64.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import ktk
from ktk import Format
from ktk.quantize import quantize
from ktk.testing import bounds, reference

transformers = pytest.importorskip("transformers")

# Its own checkpoints need it, and are skipped without; the rest is written here.
with contextlib.suppress(ImportError):
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
    from compressed_tensors.quantization import (
        QuantizationConfig,
        apply_quantization_config,
        preset_name_to_scheme,
    )
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

EXPERTS, TOP_K, TOKENS, LAYER = 5, 2, 19, 1
COMMON = {
    "vocab_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "head_dim": 16,
    "num_experts_per_tok": TOP_K,
}
#: On the blocks of 128, and blocks that are filled in part; depths are whole groups of 32.
SIZES = [(128, 256), (160, 96), (288, 192)]
PARTS = ("gate", "up", "down")
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module", params=SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def size(request: pytest.FixtureRequest) -> tuple[int, int]:
    size: tuple[int, int] = request.param
    return size


def qwen3(hidden: int, inner: int) -> Any:
    config = transformers.Qwen3MoeConfig(
        **COMMON,
        hidden_size=hidden,
        intermediate_size=2 * inner,
        moe_intermediate_size=inner,
        num_experts=EXPERTS,
        norm_topk_prob=True,
    )
    return transformers.Qwen3MoeForCausalLM(config)


def gpt_oss(hidden: int, inner: int) -> Any:
    config = transformers.GptOssConfig(
        **COMMON,
        hidden_size=hidden,
        intermediate_size=inner,
        num_local_experts=EXPERTS,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )
    return transformers.GptOssForCausalLM(config)


@dataclass(frozen=True)
class Block:
    """A model's experts, and tokens for them."""

    model: Any
    experts: Any
    weights: list[Weights]
    hidden: torch.Tensor
    ids: torch.Tensor
    topk: torch.Tensor

    def expected(self, weights: list[Weights]) -> np.ndarray:
        """Compute the block of transformers in float64 with other weights [n, k]."""
        gate_up = self.experts.gate_up_proj
        with torch.no_grad():
            for e, expert in enumerate(weights):
                if gate_up.shape[1] == 2 * len(expert["gate"]):
                    gate_up[e] = torch.cat([expert["gate"], expert["up"]])
                    self.experts.down_proj[e] = expert["down"]
                else:  # gpt-oss: transposed, and alternating
                    gate_up[e, :, 0::2] = expert["gate"].T
                    gate_up[e, :, 1::2] = expert["up"].T
                    self.experts.down_proj[e] = expert["down"].T
            found = self.experts(self.hidden.double(), self.ids, self.topk.double())
        return np.asarray(found.numpy())


def block(make: Any, size: tuple[int, int]) -> Block:
    hidden, inner = size
    generator = torch.Generator().manual_seed(hidden + inner)
    model = make(hidden, inner)
    model.set_experts_implementation("eager")
    experts = model.model.layers[LAYER].mlp.experts.double()
    weights = [
        {
            part: torch.randn(shape, generator=generator).mul_(2 / shape[1] ** 0.5).bfloat16()
            for part, shape in zip(PARTS, [(inner, hidden)] * 2 + [(hidden, inner)], strict=True)
        }
        for _ in range(EXPERTS)
    ]
    scores = torch.rand(TOKENS, EXPERTS, generator=generator)
    topk, ids = scores.softmax(-1).topk(TOP_K)
    tokens = torch.randn(TOKENS, hidden, generator=generator).bfloat16()
    return Block(model, experts, weights, tokens, ids, topk)


def check(
    folder: Path,
    made: Block,
    meant: list[Weights],
    names: tuple[str, ...],
    biases: list[dict[str, Any]] | None = None,
    **activation: Any,
) -> None:
    """Load the checkpoint into each backend, and compare weights and outputs of every variant."""
    expected = made.expected(meant)
    fields: list[dict[str, Any]] = [{part: w[part].numpy() for part in PARTS} for w in meant]
    experts = [
        reference.Expert(**one, **(biases[e] if biases else {})) for e, one in enumerate(fields)
    ]
    for name in names:
        for variant in ktk.load_backend(name).variants:
            if not variant.runnable:
                continue
            moe = ktk.MoE.from_checkpoint(folder, LAYER, name, variant=variant.name)
            assert replace(moe.config, **activation) == moe.config
            for e in range(EXPERTS):
                for part, got in zip(PARTS, moe.unpack_expert(e), strict=True):
                    # Bit by bit: what the checkpoint means, in f32.
                    want = meant[e][part].float().numpy()
                    np.testing.assert_array_equal(got, want, f"{name}: {part} of expert {e}")
            found = reference.bounded_layer(
                made.hidden.double().numpy(),
                made.ids.numpy(),
                made.topk.double().numpy(),
                experts,
                moe.config,
                (variant.act,) * 3,
                moe.shard_widths,
            )
            # Two computations in float64, by transformers and by the kit.
            np.testing.assert_allclose(found.value, expected, rtol=1e-9, atol=1e-9)
            got = moe(made.hidden.float(), made.ids, made.topk).double().numpy()
            bounds.check(got, expected, found.error * (1 + 1e-6) + 1e-9, f"{name} {variant.name}")


# --- compressed-tensors -------------------------------------------------------------------------


class Named(torch.nn.Module):
    """Linear modules under the names that a checkpoint's tensors have.

    transformers keeps experts stacked, where compressed-tensors would not see them.
    """

    def __init__(self, weights: list[Weights]) -> None:
        super().__init__()
        modules = [torch.nn.ModuleDict() for _ in weights]
        experts = torch.nn.ModuleList(modules)
        for module, parts in zip(modules, weights, strict=True):
            for part, weight in parts.items():
                linear = torch.nn.Linear(
                    weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype
                )
                linear.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
                module[f"{part}_proj"] = linear
        mlp = torch.nn.ModuleDict({"experts": experts})
        layers = {str(LAYER): torch.nn.ModuleDict({"mlp": mlp})}
        self.model: Any = torch.nn.ModuleDict({"layers": torch.nn.ModuleDict(layers)})


def set_scales(linear: Any) -> None:
    """Fill in the scales and zero points of the extremes of each group."""
    arguments = linear.quantization_scheme.weights
    weight = linear.weight.float()
    n, k = weight.shape
    if arguments.strategy == "block":
        rows, columns = arguments.block_structure
        padded = torch.nn.functional.pad(weight, (0, -k % columns, 0, -n % rows))
        groups = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).transpose(1, 2)
        low, high = groups.amin((2, 3)), groups.amax((2, 3))
    else:
        columns = arguments.group_size or k
        groups = weight.unflatten(1, (-1, columns))
        low, high = groups.amin(-1), groups.amax(-1)
    if arguments.strategy == "tensor_group":
        # A power of two, which is the same whether one multiplies with it or divides.
        whole = torch.exp2(generate_gparam(weight.amin(), weight.amax()).log2().floor())
        linear.weight_global_scale.data = whole.reshape(1)
        scale, zero = calculate_qparams(low, high, arguments, global_scale=whole)
    else:
        scale, zero = calculate_qparams(low, high, arguments)
    linear.weight_scale.data = scale.to(linear.weight_scale.dtype)
    if hasattr(linear, "weight_zero_point"):
        linear.weight_zero_point.data = zero.to(linear.weight_zero_point.dtype)


def asymmetric() -> dict[str, Any]:
    scheme: dict[str, Any] = preset_name_to_scheme("W4A16_ASYM", ["Linear"]).model_dump()
    scheme["weights"]["group_size"] = 32
    return scheme


def by_groups(size: int) -> dict[str, Any]:
    scheme: dict[str, Any] = preset_name_to_scheme("W4A16", ["Linear"]).model_dump()
    scheme["weights"]["group_size"] = size
    return scheme


def by_rows() -> dict[str, Any]:
    scheme = by_groups(32)
    scheme["weights"].update(strategy="channel", group_size=None)
    return scheme


def preset(name: str) -> dict[str, Any]:
    found = preset_name_to_scheme(name, ["Linear"]).model_dump()
    return dict(found)


#: name -> what makes the scheme, format of the file, backends that take it as it is
COMPRESSED: dict[str, tuple[Callable[[], dict[str, Any]], str, tuple[str, ...]]] = {
    "int4 g32": (partial(by_groups, 32), "pack-quantized", ("RAWINT4", "AMXINT4", "GPTQ_INT4")),
    "int4 g32 with zero points": (asymmetric, "pack-quantized", ("AMXINT4",)),
    "int4 by rows": (by_rows, "pack-quantized", ("AMXINT4",)),
    "fp8 by rows": (partial(preset, "FP8_DYNAMIC"), "float-quantized", ("FP8", "FP8_PERCHANNEL")),
    "fp8 by blocks": (partial(preset, "FP8_BLOCK"), "float-quantized", ("FP8",)),
    "int8 by rows": (partial(preset, "W8A8"), "int-quantized", ("AMXINT8",)),
    "mxfp4": (partial(preset, "MXFP4A16"), "mxfp4-pack-quantized", ("MXFP4",)),
    "nvfp4": (partial(preset, "NVFP4A16"), "nvfp4-pack-quantized", ("NVFP4",)),
    "mxfp8": (partial(preset, "MXFP8A16"), "mxfp8-quantized", ("MXFP8",)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPRESSED)
def test_checkpoints_of_compressed_tensors(
    name: str, size: tuple[int, int], tmp_path: Path
) -> None:
    pytest.importorskip("compressed_tensors")
    scheme, file_format, backends = COMPRESSED[name]
    made = block(qwen3, size)
    model = Named(made.weights)
    config = QuantizationConfig(config_groups={"group_0": scheme()}, format=file_format)
    apply_quantization_config(model, config)
    linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    for linear in linears:
        set_scales(linear)
    compressor = ModelCompressor(quantization_config=config)
    compressor.compress_model(model)
    made.model.config.save_pretrained(tmp_path)
    compressor.update_config(str(tmp_path))
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, tmp_path / "model.safetensors")
    experts = model.model["layers"][str(LAYER)]["mlp"]["experts"]
    meant = [{part: meaning(expert[f"{part}_proj"]) for part in PARTS} for expert in experts]
    check(tmp_path, made, meant, backends)


def meaning(linear: Any) -> torch.Tensor:
    """What the tensors of a compressed module mean, in float64.

    compressed-tensors unpacks them; its own product with the scales would be rounded to bf16.
    """
    state = linear.state_dict()
    zero: torch.Tensor | float = 0.0
    if "weight_shape" in state:
        shape = torch.Size(state["weight_shape"])
        codes = unpack_from_int32(state["weight_packed"], 4, shape).double()
        if "weight_zero_point" in state:
            shape = torch.Size([shape[0], state["weight_scale"].shape[1]])
            zero = unpack_from_int32(state["weight_zero_point"], 4, shape, packed_dim=0).double()
    elif "weight_packed" in state:
        packed = state["weight_packed"]
        codes = unpack_fp4_from_uint8(packed, packed.shape[0], 2 * packed.shape[1]).double()
    else:
        codes = state["weight"].double()
    scale = state["weight_scale"]
    scale = scale.double() if scale.is_floating_point() else torch.exp2(scale.double() - 127)
    arguments = linear.quantization_scheme.weights
    n, k = codes.shape
    rows, columns = arguments.block_structure or (1, arguments.group_size or k)

    def spread(groups: torch.Tensor) -> torch.Tensor:
        wide = groups.repeat_interleave(rows, 0)[:n]
        return wide.repeat_interleave(columns, 1)[:, :k]

    if isinstance(zero, torch.Tensor):
        zero = spread(zero)
    whole = state["weight_global_scale"].double() if "weight_global_scale" in state else 1.0
    values: torch.Tensor = (codes - zero) * spread(scale) / whole
    return values


# --- by published packings ----------------------------------------------------------------------


def save(folder: Path, made: Block, tensors: dict[str, torch.Tensor], **entries: Any) -> None:
    made.model.config.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": entries}))
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )


def expert_name(expert: int, part: str) -> str:
    return f"model.layers.{LAYER}.mlp.experts.{expert}.{part}_proj"


def test_fine_grained_fp8(size: tuple[int, int], tmp_path: Path) -> None:
    """The tensors of DeepSeek-V3: E4M3, and in f32 what to multiply each 128 x 128 with."""
    made = block(qwen3, size)
    tensors: dict[str, torch.Tensor] = {}
    meant: list[Weights] = []
    for e, expert in enumerate(made.weights):
        meant.append({})
        for part, weight in expert.items():
            q = quantize(weight, Format("e4m3", "f32", "none", 128, 128))
            assert q.scale is not None
            codes = q.data.view(torch.float8_e4m3fn)
            tensors[expert_name(e, part) + ".weight"] = codes
            tensors[expert_name(e, part) + ".weight_scale_inv"] = q.scale
            n, k = weight.shape
            spread = q.scale.double().repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)
            meant[e][part] = codes.double() * spread[:, :k]
    save(tmp_path, made, tensors, quant_method="fp8", weight_block_size=[128, 128])
    check(tmp_path, made, meant, ("FP8", "AMXFP8"))


def gptq_words(codes: torch.Tensor) -> torch.Tensor:
    """GPTQ's packing: bits 4 i of word r hold row 8 r + i."""
    words = torch.zeros(codes.shape[0] // 8, codes.shape[1], dtype=torch.int64)
    for i in range(8):
        words |= codes[i::8].long() << 4 * i
    return words.to(torch.int32)


def awq_words(codes: torch.Tensor) -> torch.Tensor:
    """AWQ's packing: bits 4 i of word c hold column 8 c + order[i]."""
    words = torch.zeros(codes.shape[0], codes.shape[1] // 8, dtype=torch.int64)
    for i, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
        words |= codes[:, column::8].long() << 4 * i
    return words.to(torch.int32)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["gptq", "gptq_v2", "gptq symmetric", "awq"])
def test_gptq_and_awq(method: str, size: tuple[int, int], tmp_path: Path) -> None:
    made = block(qwen3, size)
    tensors: dict[str, torch.Tensor] = {}
    meant: list[Weights] = []
    symmetric = method == "gptq symmetric"
    for e, expert in enumerate(made.weights):
        meant.append({})
        for part, weight in expert.items():
            groups = weight.double().unflatten(1, (-1, 32))
            low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
            if symmetric:
                high = torch.maximum(high, -low)
                low = -high
            scale = ((high - low) / 15).half()
            zero = torch.round(-low / scale.double()).clamp(1, 15).long()
            zero = torch.full_like(zero, 8) if symmetric else zero
            codes = torch.round(groups / scale.double()[..., None]) + zero[..., None]
            codes = codes.clamp(0, 15).long()
            exact = (codes - zero[..., None]) * scale.double()[..., None]
            meant[e][part] = exact.flatten(1)
            name, codes = expert_name(e, part), codes.flatten(1).T
            tensors[name + ".scales"] = scale.T
            if method == "awq":
                tensors[name + ".qweight"] = awq_words(codes)
                tensors[name + ".qzeros"] = awq_words(zero.T)
            else:
                stored = zero if method == "gptq_v2" else zero - 1
                tensors[name + ".qweight"] = gptq_words(codes)
                tensors[name + ".qzeros"] = gptq_words(stored).T
                tensors[name + ".g_idx"] = torch.arange(len(codes), dtype=torch.int32) // 32
    config: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    config |= {"desc_act": False, "sym": symmetric, "checkpoint_format": method.split()[0]}
    if method == "awq":
        config = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
    save(tmp_path, made, tensors, **config)
    names = ("AMXINT4", "GPTQ_INT4", "RAWINT4") if symmetric else ("AMXINT4", "AWQ_INT4")
    check(tmp_path, made, meant, names)


def test_blocks_of_gpt_oss(size: tuple[int, int], tmp_path: Path) -> None:
    """What transformers decodes: 16 bytes to a block of 32, gate and up in turn, biases."""
    made = block(gpt_oss, size)
    prefix = f"model.layers.{LAYER}.mlp.experts."
    fmt = Format("e2m1", "ue8m0", "none", 1, 32)
    stacks: dict[str, list[torch.Tensor]] = {}
    for expert in made.weights:
        both = torch.stack([expert["gate"], expert["up"]], dim=1).flatten(0, 1)
        for part, weight in {"gate_up": both, "down": expert["down"]}.items():
            q = quantize(weight, fmt)
            assert q.scale is not None
            blocks = q.data.unflatten(1, (-1, 16))
            stacks.setdefault(f"{prefix}{part}_proj_blocks", []).append(blocks)
            stacks.setdefault(f"{prefix}{part}_proj_scales", []).append(q.scale)
    tensors = {name: torch.stack(stack) for name, stack in stacks.items()}
    # [E, K, N], as the model multiplies.
    decode = transformers.integrations.mxfp4.convert_moe_packed_tensors
    both, down = (
        decode(
            tensors[f"{prefix}{part}_proj_blocks"],
            tensors[f"{prefix}{part}_proj_scales"],
            dtype=torch.float64,
        )
        for part in ("gate_up", "down")
    )
    meant = [
        {"gate": both[e, :, ::2].T, "up": both[e, :, 1::2].T, "down": down[e].T}
        for e in range(EXPERTS)
    ]
    biases = {}
    for name in ("gate_up_proj_bias", "down_proj_bias"):
        bias = getattr(made.experts, name)
        with torch.no_grad():
            bias.copy_(torch.randn(bias.shape).bfloat16())
        tensors[prefix + name] = bias.detach().bfloat16()
        biases[name] = bias.detach().numpy()
    save(tmp_path, made, tensors, quant_method="mxfp4")
    both_bias, down_bias = biases["gate_up_proj_bias"], biases["down_proj_bias"]
    check(
        tmp_path,
        made,
        meant,
        ("MXFP4",),
        biases=[
            {
                "gate_bias": both_bias[e, ::2],
                "up_bias": both_bias[e, 1::2],
                "down_bias": down_bias[e],
            }
            for e in range(EXPERTS)
        ],
        activation="swigluoai",
        activation_limit=7.0,
    )


def test_a_backend_that_cannot_store_what_is_asked_for_says_so(tmp_path: Path) -> None:
    made = block(qwen3, SIZES[0])
    tensors = {
        expert_name(e, part) + ".weight": weight
        for e, expert in enumerate(made.weights)
        for part, weight in expert.items()
    }
    save(tmp_path, made, tensors)
    with pytest.raises(ktk.CheckpointFormatError) as caught:
        ktk.MoE.from_checkpoint(tmp_path, LAYER, "MXFP4", weight_format=ktk.Format("bf16"))
    first = f"tensor {expert_name(0, 'gate')}.weight in {tmp_path / 'model.safetensors'}"
    message = f"{first}: MXFP4 does not take weights in bf16; it takes e2m1"
    assert message in str(caught.value)
    assert str(caught.value).endswith("gate: MXFP4 does not store weights as bf16")
