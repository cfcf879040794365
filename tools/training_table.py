#!/usr/bin/env python3
"""Writes the table of docs/training.md: what fine-tuning published models takes of memory.

    python tools/training_table.py            # write it
    python tools/training_table.py --check    # say whether it is current; status 1 if not

By the functions that `ktk inspect --training` calls, from the sizes that are in the models'
config.json: no files are read. Needs ktk installed on x86-64, whose build has the backends.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from ktk import Format, MoEConfig, load_backend
from ktk.cli.contents import LayerReport, Use
from ktk.cli.training import TrainingMemory, training_memory
from ktk.config import SIZES
from ktk.sizes import size_text

PAGE = Path(__file__).parents[1] / "docs/training.md"
BEGIN, END = "<!-- table: training -->\n", "<!-- end -->"

#: Layers with experts of each model, experts, experts per token, hidden and intermediate size.
MODELS = {
    "Qwen3-30B-A3B": (48, 128, 8, 2048, 768),
    "gpt-oss-120b": (36, 128, 4, 2880, 2880),
    "Qwen3-235B-A22B": (94, 128, 8, 4096, 1536),
    "DeepSeek-V3": (58, 256, 8, 7168, 2048),
    "Kimi-K2": (60, 384, 8, 7168, 2048),
}
BACKENDS = ("BF16", "AMXINT8", "AMXINT4")
RANKS = (8, 16)


def packed(config: MoEConfig, name: str) -> int:
    """Return the bytes of a layer's experts, packed for a backend from bf16."""
    core, given = load_backend(name).core, Format("bf16")
    h, i = config.hidden_size, config.intermediate_size
    each = [(h, i) if part == "down" else (i, h) for part in config.parts]
    return config.num_experts * sum(
        int(core.packed_size(core.stored_as(given, n, k), n, k)) for n, k in each
    )


def memory(model: str, backend: str, rank: int) -> TrainingMemory:
    """Return what `ktk inspect --training` says of a model whose default is this backend."""
    layers, *numbers = MODELS[model]
    sizes: dict[str, Any] = dict(zip(SIZES, numbers, strict=True))
    use = Use(packed(MoEConfig(**sizes), backend))
    report = LayerReport(0, **sizes, default_backend=backend, backends={backend: use})
    return training_memory([report] * layers, rank)


def table() -> str:
    """Return the table in Markdown."""
    ranks = " (".join(map(str, RANKS)) + ")"
    headings = [
        "model",
        *(f"experts, {name}" for name in BACKENDS),
        f"factors of rank {ranks}",
        "their gradients and Adam's moments",
        "kept of a token: products",
        "inputs",
    ]
    rows = [headings]
    for model in MODELS:
        of = [memory(model, BACKENDS[0], rank) for rank in RANKS]
        sizes = [memory(model, name, RANKS[0]).experts or 0 for name in BACKENDS]
        rows.append(
            [
                model,
                *map(size_text, sizes),
                " (".join(size_text(one.factors) for one in of) + ")",
                " (".join(size_text(one.optimizer) for one in of) + ")",
                size_text(of[0].products_per_token),
                size_text(of[0].hidden_per_token),
            ]
        )
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|---" * len(headings) + "|", *lines[1:]])


def written(page: str) -> str:
    """Return the page with its table replaced."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"{PAGE} has no place for the table")
    return f"{before}{begin}\n{table()}\n\n{end}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 if outdated")
    options = parser.parse_args()
    before = PAGE.read_text()
    after = written(before)
    if options.check:
        return int(before != after)
    PAGE.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
