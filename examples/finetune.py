"""Fine-tunes a Mixture-of-Experts model on the CPU: its experts stay packed, adapters are trained.

    python examples/finetune.py                                     # a tiny model, made here
    python examples/finetune.py --model Qwen/Qwen3-30B-A3B --data my.txt --backend AMXINT8

The model is a folder, a GGUF file, a folder that `ktk convert` wrote or a name of the hub. Its
attention gets an adapter of PEFT, if that is installed, and experts one of ktk.sft. The data is a
text file, of which each line is an example; without one, the tiny model learns a pattern.
"""

from __future__ import annotations

import argparse
import contextlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers

import ktk.hub
import ktk.sft
import ktk.transformers
from ktk.checkpoint import open_checkpoint
from ktk.errors import CheckpointError
from ktk.transformers.dense import KtkLinear
from ktk.transformers.packed import packed_modules


def tiny_model(folder: Path) -> Path:
    """Write a random model of two layers, which takes a second to train."""
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


def pattern(examples: int, length: int) -> list[dict[str, torch.Tensor]]:
    """Return sequences that count up from anywhere: what the tiny model learns."""
    starts = torch.randint(0, 128, (examples,), generator=torch.Generator().manual_seed(1))
    rows = (starts[:, None] + torch.arange(length)) % 128
    return [{"input_ids": row, "labels": row} for row in rows]


def lines(path: Path, tokenizer: Any, length: int) -> list[dict[str, torch.Tensor]]:
    """Return the lines of a text as examples."""
    found, end = [], tokenizer.eos_token or ""
    for line in path.read_text().splitlines():
        ids = tokenizer(line + end, truncation=True, max_length=length).input_ids
        if len(ids) > 1:
            found.append({"input_ids": torch.tensor(ids), "labels": torch.tensor(ids)})
    return found


def padded(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Put examples of several lengths into one batch; padding has no loss."""
    pad = torch.nn.utils.rnn.pad_sequence
    ids = [row["input_ids"] for row in rows]
    return {
        "input_ids": pad(ids, batch_first=True),
        "attention_mask": pad([torch.ones_like(one) for one in ids], batch_first=True),
        "labels": pad([row["labels"] for row in rows], batch_first=True, padding_value=-100),
    }


def attention_of(model: torch.nn.Module) -> list[str]:
    """Return the names of the dense layers of attention, whatever the family calls them.

    Classes made from them are left out: they may multiply something else, as grouped ones do.
    """
    return [
        name
        for name, module in model.named_modules()
        if type(module) in (torch.nn.Linear, KtkLinear) and "attn" in name
    ]


def count(text: str) -> int:
    """Read a number from 1 on."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", help="a folder, a GGUF file or a name of the hub; a tiny one without it"
    )
    parser.add_argument("--data", type=Path, help="a text file, an example on each line")
    parser.add_argument("--backend", help="what experts are packed for; default: as they are")
    parser.add_argument("--rank", type=count, default=8)
    parser.add_argument("--steps", type=count, default=20)
    parser.add_argument("--length", type=count, default=64, help="most tokens of an example")
    parser.add_argument("--output", type=Path, default=Path("adapter"))
    options = parser.parse_args()
    if options.model and not options.data:
        parser.error("--model needs --data: a text file")
    if options.data and not options.model:
        parser.error("--data needs --model: the tiny model has no tokenizer")
    if options.length < 2:
        parser.error("--length of 1 leaves no token to predict")
    if options.backend:
        try:
            ktk.load_backend(options.backend)
        except ktk.BackendError as error:
            parser.error(str(error))

    path = options.model or tiny_model(options.output / "model")
    # What is not here, or not whole, transformers downloads.
    with contextlib.suppress(CheckpointError):
        found = ktk.hub.find_model(path)
        with open_checkpoint(found) as checkpoint:
            for fault in checkpoint.faults():
                raise fault
        path = found
    if options.data:
        tokenizer = ktk.transformers.load_tokenizer(path)
        data = lines(options.data, tokenizer, options.length)
    else:
        data = pattern(128, options.length)
    if not data:
        parser.error(f"{options.data} has no line of two tokens or more")

    model = ktk.transformers.load(path, backend=options.backend, dtype=torch.bfloat16)
    used = {packed.moe.backend.name for packed in packed_modules(model).values()}
    print(f"experts are computed by {', '.join(sorted(used))}")
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    wrapped = model
    if find_spec("peft") and (attention := attention_of(model)):
        import peft

        config = peft.LoraConfig(r=options.rank, target_modules=attention)
        wrapped = peft.get_peft_model(model, config)
    ktk.sft.add_lora(wrapped, rank=options.rank, alpha=2 * options.rank)

    arguments = transformers.TrainingArguments(
        output_dir=str(options.output / "trainer"),
        max_steps=options.steps,
        per_device_train_batch_size=4,
        learning_rate=1e-2 if not options.model else 1e-4,
        logging_steps=max(options.steps // 10, 1),
        save_strategy="no",  # or callbacks=[ktk.sft.SaveAdapters()] below
        report_to=[],
        use_cpu=True,
    )
    trainer = transformers.Trainer(wrapped, arguments, train_dataset=data, data_collator=padded)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"loss: {losses[0]:.3f} at first, {losses[-1]:.3f} at last")

    ktk.sft.save_adapter(wrapped, options.output / "experts")
    if wrapped is not model:
        wrapped.save_pretrained(options.output / "attention")
    print(f"adapters are in {options.output}")


if __name__ == "__main__":
    main()
