"""How checkpoints store one matrix: one row for each scheme.

A row says which tensors make a matrix, by what follows the matrix's name, with their shapes and
element types, and which function makes a `Matrix` of them; `scheme` has the language of shapes. It
holds for every naming scheme of `families`: ``experts.3.up_proj`` + ``.weight_packed``,
``experts.gate_up_proj`` + ``_blocks``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ktk.checkpoint.safetensors import awq, bitsandbytes, floats, hqq, integers, torchao
from ktk.checkpoint.safetensors.scheme import Layout, Part, Scheme, Tensors, rows_and_columns
from ktk.expert import Matrix

_FLOATS = ("F32", "BF16", "F16")
_FP8 = ("F8_E4M3", "F8_E5M2")
_EXPONENTS = ("U8", "F8_E8M0")
_WORDS = ("I32",)
_BY_ROW = "N 1 | N | 1 1 | 1 |"
# Which group a column is of.
_ORDER = {"order": integers.uneven}

PLAIN = Scheme(
    "plain",
    "models that are not quantised",
    {"data": Part(".weight", "N K", ("BF16", "F16", "F32"), fused="")},
    floats.plain,
)


def _fp8(
    name: str,
    found: str,
    scale: str,
    shape: str,
    dtypes: tuple[str, ...],
    decode: Callable[[Tensors, Layout], Matrix],
) -> Scheme:
    tensors = {
        "data": Part(".weight", "N K", _FP8, fused=""),
        "scale": Part("." + scale, shape, dtypes, fused=scale.removeprefix("weight")),
    }
    return Scheme(name, found, tensors, decode)


def _nvfp4(
    found: str, shape: str, scale: str, decode: Callable[[Tensors, Layout], Matrix]
) -> Scheme:
    tensors = {
        "data": Part(".weight", shape, ("U8",), fused=""),
        "scale": Part(".weight_scale", scale, ("F8_E4M3",), fused="_weight_scale"),
        "factor": Part(".weight_scale_2", "1 |", ("F32",), fused="_weight_scale_2", shared=True),
    }
    return Scheme("nvfp4", found, tensors, decode)


def _compressed_tensors(name: str, found: str, shape: str, dtypes: tuple[str, ...]) -> Scheme:
    tensors = {
        "data": Part(".weight_packed", shape, dtypes),
        "scale": Part(".weight_scale", "N K/G", _FLOATS),
        "zero": Part(".weight_zero_point", "N*b/32 K/G", _WORDS, optional=True),
        "shape": Part(".weight_shape", "2", ("I64", "I32"), optional=True),
        "order": Part(".weight_g_idx", "K", ("I32", "I64"), optional=True),
    }
    return Scheme(
        name,
        found,
        tensors,
        integers.compressed_tensors,
        decoded_if=_ORDER,
        # Where config.json has several widths, the shape of the codes does not tell the columns.
        sizes={"shape": rows_and_columns},
    )


def _four_bits(kind: str) -> Scheme:
    tensors = {
        "data": Part(".weight", "N*K/2 1 | N*K/4 1 | N*K/8 1", ("U8", "I8", *_FLOATS)),
        "absmax": Part(".weight.absmax", "*", ("F32", "U8")),
        "map": Part(".weight.quant_map", "16", ("F32",)),
        "state": Part(f".weight.quant_state.bitsandbytes__{kind}", "*", ("U8",)),
        "nested_absmax": Part(".weight.nested_absmax", "*", ("F32",), optional=True),
        "nested_map": Part(".weight.nested_quant_map", "256", ("F32",), optional=True),
    }
    return Scheme(
        f"{kind} by bitsandbytes",
        "bitsandbytes",
        tensors,
        bitsandbytes.four_bits,
        sizes={"state": bitsandbytes.sizes},
    )


def _torchao(
    found: str,
    data: tuple[str, tuple[str, ...]],
    scale: str,
    zero: tuple[str, ...],
    decode: Callable[[Tensors, Layout], Matrix],
) -> Scheme:
    """Return a row of torchao's; `zero` are the types of zero points, none where there are none."""

    def part(role: str, shape: str, dtypes: tuple[str, ...], *, optional: bool = False) -> Part:
        return Part(f"._weight_{role}", shape, dtypes, f"_{{}}_{role}", optional)

    tensors = {"data": part("qdata", *data), "scale": part("scale", scale, _FLOATS)}
    if zero:
        tensors["zero"] = part("zero_point", scale, zero, optional=decode is integers.int8)
    test = {"zero": _has_zeros} if zero else {}
    return Scheme(f"{found} of torchao", f"torchao, {found}", tensors, decode, test)


def _has_zeros(zero: torch.Tensor, layout: Layout) -> bool:
    return bool(zero.any())


# In order of trial; the first whose tensors are there, of the right types and shapes.
SCHEMES = (
    PLAIN,
    # Before blocks, which weight_block_size [1, 32] would fit
    _fp8("mxfp8", "MiniMax-M3", "weight_scale_inv", "N K/32", _EXPONENTS, floats.mxfp8),
    _fp8("mxfp8", "compressed-tensors", "weight_scale", "N K/32", _EXPONENTS, floats.mxfp8),
    _fp8(
        "fp8 by blocks",
        "DeepSeek-V3, MiniMax-M2, GLM, Qwen3",
        *("weight_scale_inv", "N/B K/C", (*_FLOATS, *_EXPONENTS)),
        floats.fp8_blocks,
    ),
    _fp8(
        "fp8 by blocks",
        "compressed-tensors",
        *("weight_scale", "N/B K/C", _FLOATS),
        floats.fp8_blocks,
    ),
    _fp8(
        "fp8 by blocks",
        "DeepSeek-V4.1's dense layers",
        *("scale", "N/B K/C", (*_FLOATS, *_EXPONENTS)),
        floats.fp8_blocks,
    ),
    *(
        _fp8("fp8 by rows", found, scale, _BY_ROW, _FLOATS, floats.fp8_rows)
        for scale, found in (
            ("weight_scale", "compressed-tensors `float-quantized`, by channel or by tensor"),
            ("weight_scale_inv", "transformers, a static scale for a matrix"),
            ("qscale_weight", "Mistral, a static scale for a matrix"),
        )
    ),
    *(
        Scheme(
            name,
            f"compressed-tensors `int-quantized`, {name.removeprefix('int8 ')}",
            {
                "data": Part(".weight", "N K", ("I8",)),
                "scale": Part(".weight_scale", shape, _FLOATS),
                "zero": Part(".weight_zero_point", shape, ("I8", "I32"), optional=True),
            },
            integers.int8,
            decoded_if={"zero": _has_zeros},
        )
        for name, shape in (("int8 by rows", _BY_ROW), ("int8 by groups", "N K/G"))
    ),
    Scheme(
        "int8 by bitsandbytes",
        "bitsandbytes, LLM.int8",
        {
            "data": Part(".weight", "N K", ("I8",)),
            "scale": Part(".SCB", "N", _FLOATS),
            "layout": Part(".weight_format", "| 1", ("U8",), optional=True),
        },
        bitsandbytes.int8,
    ),
    _four_bits("nf4"),
    _four_bits("fp4"),
    _compressed_tensors(
        "integers by compressed-tensors",
        "compressed-tensors `pack-quantized` of 2 to 8 bits: Kimi-K2-Thinking",
        *("N K*b/32", _WORDS),
    ),
    # MXFP4 below differs in the type of its scales.
    _compressed_tensors(
        "integers in bytes", "compressed-tensors, the same bytes as uint8", "N K*b/8", ("U8",)
    ),
    Scheme(
        "integers by gptq",
        "GPTQ of 2 to 8 bits",
        {
            "data": Part(".qweight", "K*b/32 N", _WORDS),
            "scale": Part(".scales", "K/G N", _FLOATS),
            "zero": Part(".qzeros", "K/G N*b/32", _WORDS, optional=True),
            "order": Part(".g_idx", "K", ("I32", "I64"), optional=True),
        },
        integers.gptq,
        decoded_if=_ORDER,
    ),
    Scheme(
        "int4 by awq",
        "AWQ, `gemm`",
        {
            "data": Part(".qweight", "K N*b/32", _WORDS),
            "scale": Part(".scales", "K/G N", _FLOATS),
            "zero": Part(".qzeros", "K/G N*b/32", _WORDS),
        },
        awq.gemm,
    ),
    Scheme(
        "int4 by awq for gemv",
        "AWQ, `gemv`",
        {
            "data": Part(".qweight", "N K*b/32", _WORDS),
            "scale": Part(".scales", "N Z*8", _FLOATS),
            "zero": Part(".qzeros", "N Z", _WORDS),
        },
        awq.gemv,
    ),
    Scheme(
        "int4 by awq for gemv_fast",
        "AWQ, `gemv_fast`",
        {
            "data": Part(".qweight", "N/4 K", ("I16",)),
            "scale": Part(".scales", "Z*8 N", ("F16",)),
            "zero": Part(".qzeros", "Z*8 N", ("F16",)),
        },
        awq.gemv_fast,
    ),
    Scheme(
        "hqq",
        "HQQ",
        {
            "data": Part(".W_q", "* *", ("U8", "I32", *_FLOATS)),
            "scale": Part(".scale", "* * |", _FLOATS),
            "zero": Part(".zero", "* * |", _FLOATS),
            "shape": Part(".shape", "2", ("I64", "I32")),
            "packing": Part(".packing", "*", ("U8",)),
            "axis": Part(".axis", "| 1", ("I32",)),
            "group": Part(".group_size", "| 1", ("I32",), optional=True),
            # How they were made, and what to compute with.
            **{
                name: Part(f".{name}", shape, ("U8", "I32", "F32"), optional=True)
                for shape, names in (
                    ("*", ("compute_dtype", "unpack_view_dtype")),
                    ("| 1", ("nbits", "view_as_float", "channel_wise", "optimize", "round_zero")),
                    ("| 1", ("quant_scale", "quant_zero", "offload_meta")),
                    ("| 1", ("encoded_state_dict", "stores_quant_config")),
                )
                for name in names
            },
        },
        hqq.hqq,
        sizes={"shape": rows_and_columns},
        tell=hqq.tell,
    ),
    _torchao("Int8Tensor", ("N K", ("I8",)), _BY_ROW, ("I8", *_FLOATS), integers.int8),
    _torchao("Int8Tensor", ("N K", ("I8",)), "N K/G", ("I8", *_FLOATS), integers.int8),
    _torchao("Int4Tensor", ("N K/2", ("I8", "U8")), "K/G N", _FLOATS, torchao.int4),
    _torchao("Float8Tensor", ("N K", _FP8), _BY_ROW, (), floats.fp8_rows),
    _torchao("Float8Tensor", ("N K", _FP8), "N/B K/C", (), floats.fp8_blocks),
    Scheme(
        "mxfp4 in blocks",
        "gpt-oss",
        {
            "data": Part("_blocks", "N K/32 16", ("U8",), fused="_blocks"),
            "scale": Part("_scales", "N K/32", ("U8",), fused="_scales"),
        },
        floats.mxfp4,
    ),
    Scheme(
        "mxfp4",
        "DeepSeek-V4",
        {
            "data": Part(".weight", "N K/2", ("I8", "U8")),
            "scale": Part(".scale", "N K/32", _EXPONENTS),
        },
        floats.mxfp4,
    ),
    _nvfp4("ModelOpt", "N K/2", "N K/16", floats.nvfp4),
    # What experts share in Llama-4 and gpt-oss
    _nvfp4("ModelOpt, transposed", "K/2 N", "K/16 N", floats.nvfp4_transposed),
    Scheme(
        "nvfp4",
        "compressed-tensors `nvfp4-pack-quantized`",
        {
            "data": Part(".weight_packed", "N K/2", ("U8",)),
            "scale": Part(".weight_scale", "N K/16", ("F8_E4M3",)),
            "factor": Part(".weight_global_scale", "1 |", ("F32",)),
        },
        floats.nvfp4_divided,
    ),
    Scheme(
        "mxfp4",
        "compressed-tensors `mxfp4-pack-quantized`",
        {
            "data": Part(".weight_packed", "N K/2", ("U8",)),
            "scale": Part(".weight_scale", "N K/32", _EXPONENTS),
        },
        floats.mxfp4,
    ),
)
