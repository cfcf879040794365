"""Writes a Qwen3-MoE of random weights as large as asked for, to measure whole models with.

    python tools/bench/make_model.py OUT                  # OUT/bf16, a folder as of a hub
    python tools/bench/make_model.py OUT --gguf           # OUT/q4_k_m.gguf

8 layers of Qwen3-30B-A3B, with its vocabulary, by default: 10.9 GB in bf16; 3.5 GB as GGUF, whose
block types are mixed as in llama.cpp's Q4_K_M. The tokenizer knows bytes and a few pairs of
letters; what a model of random weights says is nonsense.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import save_file

from ktk.testing.ggml import random_blocks

HIDDEN, INNER, EXPERTS, TOP_K = 2048, 768, 128, 8
HEADS, KV_HEADS, HEAD = 32, 4, 128
VOCABULARY = 151936
EPSILON, ROPE_BASE = 1e-6, 1e6
CHAT = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

# Names in transformers and in GGUF, shape, and the block type that llama.cpp's Q4_K_M takes. It
# gives attention's v and the experts' down more bits in half of the layers.
LAYER = [
    ("self_attn.q_proj", "attn_q", (HEADS * HEAD, HIDDEN), Type.Q4_K),
    ("self_attn.k_proj", "attn_k", (KV_HEADS * HEAD, HIDDEN), Type.Q4_K),
    ("self_attn.v_proj", "attn_v", (KV_HEADS * HEAD, HIDDEN), Type.Q6_K),
    ("self_attn.o_proj", "attn_output", (HIDDEN, HEADS * HEAD), Type.Q4_K),
    ("mlp.gate", "ffn_gate_inp", (EXPERTS, HIDDEN), Type.F32),
]
NORMS = [
    ("self_attn.q_norm", "attn_q_norm", HEAD),
    ("self_attn.k_norm", "attn_k_norm", HEAD),
    ("input_layernorm", "attn_norm", HIDDEN),
    ("post_attention_layernorm", "ffn_norm", HIDDEN),
]
EXPERT = [
    ("gate_proj", "ffn_gate_exps", (INNER, HIDDEN), Type.Q4_K),
    ("up_proj", "ffn_up_exps", (INNER, HIDDEN), Type.Q4_K),
    ("down_proj", "ffn_down_exps", (HIDDEN, INNER), Type.Q6_K),
]
WHOLE = [
    ("model.embed_tokens", "token_embd", (VOCABULARY, HIDDEN), Type.Q4_K),
    ("lm_head", "output", (VOCABULARY, HIDDEN), Type.Q6_K),
]


def main() -> None:
    """Write what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder to write into")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--gguf", action="store_true", help="a GGUF file instead of safetensors")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.gguf:
        write_gguf(given.out / "q4_k_m.gguf", given.layers)
    else:
        write_safetensors(given.out / "bf16", given.layers)


def write_safetensors(folder: Path, layers: int) -> None:
    """Write config, tokenizer, generation config and a file of weights for each layer."""
    folder.mkdir(exist_ok=True)
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_hidden_layers": layers,
        "hidden_size": HIDDEN,
        "intermediate_size": 3 * HIDDEN,
        "moe_intermediate_size": INNER,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "norm_topk_prob": True,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 32768,
        "rope_theta": ROPE_BASE,
        "rms_norm_eps": EPSILON,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    write_tokenizer(folder)
    weight_map: dict[str, str] = {}
    size = 0
    for number, tensors in enumerate([*(layer(n) for n in range(layers)), rest()]):
        file = f"model-{number + 1:05d}-of-{layers + 1:05d}.safetensors"
        found = dict(tensors)
        save_file(found, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(found, file)
        size += sum(tensor.nbytes for tensor in found.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def layer(number: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a layer."""
    name = f"model.layers.{number}"
    for stem, _, shape, _ in LAYER:
        yield f"{name}.{stem}.weight", random(shape, number)
    for stem, _, width in NORMS:
        yield f"{name}.{stem}.weight", torch.ones(width, dtype=torch.bfloat16)
    for stem, _, shape, _ in EXPERT:
        drawn = random(shape, number)
        for expert in range(EXPERTS):  # drawing each anew would take minutes
            yield f"{name}.mlp.experts.{expert}.{stem}.weight", drawn.roll(7 * expert + 1)


def rest() -> Iterator[tuple[str, torch.Tensor]]:
    """Yield embedding, head and the last norm."""
    for stem, _, shape, _ in WHOLE:
        yield f"{stem}.weight", random(shape, -1)
    yield "model.norm.weight", torch.ones(HIDDEN, dtype=torch.bfloat16)


def random(shape: tuple[int, int], seed: int) -> torch.Tensor:
    """Return weights that keep the variance of what they multiply."""
    generator = torch.Generator().manual_seed(seed + 2)
    made: torch.Tensor = torch.randn(shape, generator=generator) / shape[1] ** 0.5
    return made.bfloat16()


def words() -> tuple[list[str], list[str]]:
    """Return tokens, as many as the vocabulary has, and merges."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    merges = [f"{a} {b}" for a in "etaoin" for b in "etaoin"]
    tokens = ["<pad>", "<s>", "</s>", *bytes_to_unicode().values()]
    tokens += [pair.replace(" ", "") for pair in merges]
    return tokens + [f"<{i}>" for i in range(VOCABULARY - len(tokens))], merges


def write_tokenizer(folder: Path) -> None:
    """Write a byte-level tokenizer, as `AutoTokenizer` reads it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens, merges = words()
    pairs = [(first, second) for first, second in map(str.split, merges)]
    model = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, pairs))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    made.chat_template = CHAT
    made.save_pretrained(folder)


def write_gguf(path: Path, layers: int) -> None:
    """Write a GGUF file of random blocks."""
    writer = gguf.GGUFWriter(path, "qwen3moe", use_temp_file=True)
    writer.add_type("model")
    writer.add_block_count(layers)
    writer.add_context_length(32768)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(3 * HIDDEN)
    writer.add_expert_feed_forward_length(INNER)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(TOP_K)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_layer_norm_rms_eps(EPSILON)
    writer.add_rope_freq_base(ROPE_BASE)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_K_M)
    tokens, merges = words()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template(CHAT)
    rng = np.random.default_rng(0)
    for _, name, shape, kind in WHOLE:
        put(writer, name, shape, kind, rng)
    put(writer, "output_norm", (HIDDEN,), Type.F32, rng)
    for number in range(layers):
        # llama.cpp's rule for which layers get more bits.
        more = not layers // 8 <= number < 7 * layers // 8 or (number - layers // 8) % 3 == 2
        for _, name, shape, kind in LAYER:
            kept = kind if kind != Type.Q6_K or more else Type.Q4_K
            put(writer, f"blk.{number}.{name}", shape, kept, rng)
        for _, name, width in NORMS:
            put(writer, f"blk.{number}.{name}", (width,), Type.F32, rng)
        for _, name, shape, kind in EXPERT:
            kept = kind if kind != Type.Q6_K or more else Type.Q4_K
            put(writer, f"blk.{number}.{name}", (EXPERTS, *shape), kept, rng)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def put(
    writer: gguf.GGUFWriter, name: str, shape: tuple[int, ...], kind: Type, rng: np.random.Generator
) -> None:
    """Add a tensor: ones for a norm, else random values or blocks."""
    if len(shape) == 1:
        writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
        return
    size = shape[-1] ** -0.5
    if kind == Type.F32:
        writer.add_tensor(f"{name}.weight", rng.normal(0, size, shape).astype(np.float32))
        return
    one = random_blocks(kind.name.lower(), (shape[-2], shape[-1]), 3 * size, rng)
    data = one if len(shape) == 2 else np.broadcast_to(one, (shape[0], *one.shape))
    writer.add_tensor(f"{name}.weight", np.ascontiguousarray(data), raw_dtype=kind)


if __name__ == "__main__":
    main()
