"""A tiny Qwen3-MoE as a GGUF file, as llama.cpp's converter would name and store its tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import tiny
import torch
from gguf import GGMLQuantizationType as Type

ARCH = "qwen3moe"
WIDE = 256  # blocks of some types
SIZES: dict[str, Any] = {
    "hidden_size": WIDE,
    "moe_intermediate_size": WIDE,
    "intermediate_size": 2 * WIDE,
    "num_attention_heads": 4,
    "head_dim": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "rms_norm_eps": 1e-6,
    "norm_topk_prob": True,
}


def write(folder: Path, **split: int) -> tuple[Path, Any]:
    """Write it; return the first file, and the model in float32 that its blocks mean."""
    exact = tiny.Family("Qwen3MoeForCausalLM", SIZES).make()
    config = exact.config
    writer = gguf.GGUFWriter(folder / "model.gguf", ARCH, **split)
    writer.add_type("model")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(1e6)
    add_tokenizer(writer, config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3MOE, config.num_hidden_layers)
    with torch.no_grad():
        for name, values in exact.state_dict().items():
            stem, _, suffix = name.rpartition(".")
            layer = name.split(".")[2] if "layers" in name else ""
            if suffix == "gate_up_proj":
                gate, up = values.chunk(2, dim=1)
                gate.copy_(put(writer, f"blk.{layer}.ffn_gate_exps.weight", gate, Type.Q8_0))
                up.copy_(put(writer, f"blk.{layer}.ffn_up_exps.weight", up, Type.Q8_0))
            elif suffix == "down_proj":
                values.copy_(put(writer, f"blk.{layer}.ffn_down_exps.weight", values, Type.Q4_0))
            else:
                kind = Type.Q8_0 if values.ndim > 1 else Type.F32
                values.copy_(put(writer, f"{names.get_name(stem)}.{suffix}", values, kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    exact.set_experts_implementation("eager")
    return sorted(folder.glob("*.gguf"))[0], exact


def put(writer: Any, name: str, values: torch.Tensor, kind: Type) -> torch.Tensor:
    """Write a tensor, and return what its blocks mean."""
    data = gguf.quants.quantize(values.numpy(), kind)
    writer.add_tensor(name, data, raw_dtype=kind)
    return torch.from_numpy(gguf.quants.dequantize(data, kind))


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
