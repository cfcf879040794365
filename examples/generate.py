"""Lets a model of transformers reply, its experts computed by ktk.

    python examples/generate.py                                    # a small random model, made here
    python examples/generate.py --model allenai/OLMoE-1B-7B-0125-Instruct --backend AMXINT8

A model without a chat template goes on with the prompt. The small model has no tokenizer: it goes
on with numbers.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch
import transformers

import ktk.transformers


def tiny_model(folder: Path) -> Path:
    """Write a random model of two layers."""
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
    )
    transformers.Qwen3MoeForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


def count(text: str) -> int:
    """Read a number from 1 on."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a folder, a GGUF file or a name of the hub")
    parser.add_argument("--backend", help="what experts are packed for; default: as they are")
    parser.add_argument("--prompt", default="Why is the sky blue?")
    parser.add_argument("--max-tokens", type=count, default=32)
    options = parser.parse_args()
    if options.backend:
        try:
            ktk.load_backend(options.backend)
        except ktk.BackendError as error:
            parser.error(str(error))

    with tempfile.TemporaryDirectory() as folder:
        path = options.model or tiny_model(Path(folder))
        model = ktk.transformers.load(path, backend=options.backend)
    tokenizer = ktk.transformers.load_tokenizer(path) if options.model else None
    if tokenizer and tokenizer.chat_template:
        message = [{"role": "user", "content": options.prompt}]
        inputs = tokenizer.apply_chat_template(
            message, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
    elif tokenizer:
        inputs = tokenizer(options.prompt, return_tensors="pt", return_token_type_ids=False)
    else:
        inputs = {"input_ids": torch.arange(8)[None], "attention_mask": torch.ones(1, 8).long()}

    begin = time.perf_counter()
    found = model.generate(**inputs, max_new_tokens=options.max_tokens, do_sample=False)
    seconds = time.perf_counter() - begin
    reply = found[0, inputs["input_ids"].shape[1] :]
    print(tokenizer.decode(reply, skip_special_tokens=True) if tokenizer else reply.tolist())
    print(f"{len(reply)} tokens in {seconds:.2f} s")


if __name__ == "__main__":
    main()
