"""Small models with a real tokenizer, made by transformers and the tokenizers library."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SENTENCES = [
    "The quick brown fox jumps over the lazy dog while a router picks two experts for it.",
    "Memory is read once, at the rate that memory has, and nothing is computed twice.",
    "What is the capital of France? It is Paris, and that of Italy is Rome.",
    "Grüße aus München: übermäßig viele Wörter, naïve café, 你好世界。",
]
CONTEXT = 8192
# With the words of Qwen's own, whose replies transformers' server takes apart.
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer(template: str | None = TEMPLATE, words: int = 500, first: Sequence[str] = ()) -> Any:
    """Train byte-level BPE on a few sentences; `first` are special tokens before the template's."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=words,
        special_tokens=[*first, "<|im_end|>", "<|im_start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(SENTENCES, trainer)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    fast.chat_template = template
    return fast


def config(**changes: Any) -> transformers.Qwen3MoeConfig:
    """What a small Qwen3-MoE is like."""
    made = {
        "vocab_size": 512,
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.3,
        "eos_token_id": 0,
    }
    return transformers.Qwen3MoeConfig(**made | changes)


def write(folder: Path, template: str | None = TEMPLATE, **changes: Any) -> Path:
    """Write a model of random weights, always the same ones, with its tokenizer."""
    torch.manual_seed(1)
    model = transformers.Qwen3MoeForCausalLM(config(**changes)).bfloat16()
    model.generation_config.eos_token_id = 0
    model.save_pretrained(folder)
    tokenizer(template).save_pretrained(folder)
    return folder
