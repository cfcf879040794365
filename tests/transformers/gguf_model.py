"""Tiny models as GGUF files, as llama.cpp's converter would name and store their tensors."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tiny
import torch
from gguf import GGMLQuantizationType as Type

from ktk import ik_types
from ktk.testing.ggml import random_blocks

WIDE = 256  # blocks of some types
SIZES: dict[str, Any] = {
    "hidden_size": WIDE,
    "moe_intermediate_size": WIDE,
    "intermediate_size": WIDE,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
}
QWEN3 = tiny.Family("Qwen3MoeForCausalLM", {**SIZES, "norm_topk_prob": True})
TIED = tiny.Family("Qwen3MoeForCausalLM", {**QWEN3.extra, "tie_word_embeddings": True})
# Transformers fills in what it does not read: a stretched RoPE.
GPT_OSS = tiny.Family("GptOssForCausalLM", {**SIZES, "sliding_window": 128})


def write(
    folder: Path,
    family: tiny.Family = QWEN3,
    dense: str = "q8_0",
    experts: Type | None = None,
    metadata: Callable[[Any], None] | None = None,
    **split: Any,
) -> tuple[Path, Any]:
    """Write it; return the first file, and the model in float32 that its blocks mean.

    `dense` is the type of all matrices but those of experts: f32, q8_0, or one of ik_llama.cpp,
    whose values are random. `experts` is that of all matrices of experts; by default they differ.
    `metadata` gets the writer, for more of them.
    """
    exact = family.make()
    config = exact.config
    arch = gguf.MODEL_ARCH.GPT_OSS if family is GPT_OSS else gguf.MODEL_ARCH.QWEN3MOE
    writer = gguf.GGUFWriter(folder / "model.gguf", gguf.MODEL_ARCH_NAMES[arch], **split)
    writer.add_type("model")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_expert_feed_forward_length(WIDE)
    writer.add_expert_count(config.num_local_experts if family is GPT_OSS else config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if family is GPT_OSS:
        writer.add_sliding_window(config.sliding_window)
    if metadata is not None:
        metadata(writer)
    add_tokenizer(writer, config.vocab_size)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    with torch.no_grad():
        for name, values in exact.state_dict().items():
            stem, _, suffix = name.rpartition(".")
            block = f"blk.{name.split('.')[2]}" if "layers" in name else ""
            if ".experts." in name:
                put_experts(writer, block, suffix, values, family is GPT_OSS, experts)
            elif not (name == "lm_head.weight" and family is TIED):
                kind = Type.Q8_0 if values.ndim > 1 and dense != "f32" else Type.F32
                known = f"{names.get_name(stem)}.{suffix}"
                if values.ndim > 1 and dense in ik_types.TYPES:
                    put_random(writer, known, values, ik_types.TYPES[dense])
                    continue
                put(
                    writer,
                    f"{block}.attn_sinks.weight" if suffix == "sinks" else known,
                    values,
                    kind,
                )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    exact.set_experts_implementation("eager")
    return sorted(folder.glob("*.gguf"))[0], exact


def put_experts(
    writer: Any,
    block: str,
    name: str,
    values: torch.Tensor,
    interleaved: bool,
    experts: Type | None = None,
) -> None:
    """Write the experts of a layer; of gpt-oss they are transposed, gate and up in turns."""
    part, bias = name.removesuffix("_bias"), name.endswith("_bias")
    rows = values.transpose(1, 2) if interleaved and not bias else values
    parts = {"down": rows}
    if part == "gate_up_proj":
        gate, up = (rows[:, ::2], rows[:, 1::2]) if interleaved else rows.chunk(2, dim=1)
        parts = {"gate": gate, "up": up}
    for kind, one in parts.items():
        wide = Type.MXFP4 if interleaved else Type.Q4_0 if kind == "down" else Type.Q8_0
        suffix = "bias" if bias else "weight"
        put(writer, f"{block}.ffn_{kind}_exps.{suffix}", one, Type.F32 if bias else experts or wide)


def write_tied(folder: Path) -> tuple[Path, Any]:
    return write(folder, TIED)


def write_gpt_oss(folder: Path) -> tuple[Path, Any]:
    return write(folder, GPT_OSS)


def write_split(folder: Path) -> tuple[Path, Any]:
    """Write it in several files, as large models are."""
    first, exact = write(folder, split_max_tensors=10)
    assert len(list(folder.glob("*.gguf"))) > 2
    return first, exact


def put(writer: Any, name: str, values: torch.Tensor, kind: Type) -> None:
    """Write a tensor, and put what its blocks mean in the place of its values.

    Types that `gguf` decodes and does not write get random blocks of about the values' size.
    """
    try:
        data = gguf.quants.quantize(values.contiguous().numpy(), kind)
    except NotImplementedError:
        rows = (values.numel() // values.shape[-1], values.shape[-1])
        largest = 3 * float(values.std())  # of a block, as normal numbers have it
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        data = random_blocks(kind.name.lower(), rows, largest, rng)
        data = data.reshape(*values.shape[:-1], -1)
    writer.add_tensor(name, data, raw_dtype=kind)
    values.copy_(torch.from_numpy(gguf.quants.dequantize(data, kind)))


def put_random(writer: Any, name: str, values: torch.Tensor, kind: ik_types.IkType) -> None:
    """Write random blocks of a size, and put what they mean in the place of a tensor's values."""
    rng = np.random.default_rng(len(name))
    n, d = len(values), kind.d_nbytes
    blocks = random_blocks(kind.name, (n, values.shape[1]), 0.05, rng)
    blocks = blocks.reshape(n, -1, kind.nbytes)
    if kind.row_prefix:
        assert kind.row_prefix == d
        blocks[:, 1:, :d] = blocks[:, :1, :d]
        rows = np.concatenate([blocks[:, 0, :d], blocks[:, :, d:].reshape(n, -1)], axis=1)
    else:
        rows = blocks.reshape(n, -1)
    number: Any = kind.number
    writer.add_tensor(name, rows.view(np.int8), raw_shape=values.shape, raw_dtype=number)
    values.copy_(torch.from_numpy(kind.values(blocks.reshape(n, -1))))


def add_tokenizer(writer: Any, size: int) -> None:
    """Add bytes, and pairs of letters as merges."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = list(bytes_to_unicode().values())
    merges = [f"{a} {b}" for a in "etaoin" for b in "etaoin"]
    words = ["<pad>", "<s>", "</s>", *letters, *(pair.replace(" ", "") for pair in merges)]
    words += [f"<{i}>" for i in range(size - len(words))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(words)
    writer.add_token_types([3] * 3 + [1] * (size - 3))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
