"""What `ktk placement` does: masks of counts, and what they would have covered."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import typer
from rich.console import Console

from ktk.errors import CheckpointError
from ktk.placement import load_counts, place, save_for_sglang, save_masks
from ktk.placement.counts import Counts
from ktk.terminal import plain_table


def run_placement(
    source: Path,
    *,
    strategy: str,
    per_layer: int | None,
    ratio: float | None,
    output: Path | None,
    sglang: Path | None,
    seed: int,
    as_json: bool,
) -> None:
    """Choose experts for a GPU, write what is asked for, and say what each layer has there.

    Parameters
    ----------
    source
        A file of counts, or a model where the strategy needs none.
    strategy, seed
        As of `ktk.placement.place`.
    per_layer, ratio
        Experts for the GPU: of each layer on average, or a part of all. One of them.
    output
        Where masks go.
    sglang
        Where counts go that make SGLang choose the same.
    as_json
        Print JSON in the place of a table.
    """
    counts, num_layers, known = _counts_of(source, strategy)
    experts = len(next(iter(counts.values())))
    total = len(counts) * experts
    number = round(total * ratio) if ratio is not None else (per_layer or 0) * len(counts)
    masks = place(counts, number, strategy, seed=seed)
    if output is not None:
        save_masks(output, masks)
    if sglang is not None:
        given = counts if strategy == "frequency" else {n: m.numpy() for n, m in masks.items()}
        save_for_sglang(sglang, given, num_layers)
    rows = []
    for layer, mask in masks.items():
        chosen, covered = _sum(counts[layer]), _sum(counts[layer][mask.numpy()])
        share = covered / chosen if known and chosen else None
        rows.append((layer, int(mask.sum()), share))
    placed = sum(count for _, count, _ in rows)
    all_chosen = sum(_sum(one) for one in counts.values())
    all_covered = sum(_sum(counts[n][m.numpy()]) for n, m in masks.items())
    share = all_covered / all_chosen if known and all_chosen else None
    if as_json:
        document = {
            "strategy": strategy,
            "num_experts": experts,
            "gpu_experts": placed,
            "covered": share,
            "layers": [
                {"layer": layer, "gpu_experts": count, "covered": part}
                for layer, count, part in rows
            ],
        }
        typer.echo(json.dumps(document, indent=2))
        return
    table = plain_table()
    table.add_column("layer")
    table.add_column("experts on the GPU")
    table.add_column("of its choices", justify="right")
    for layer, count, part in rows:
        table.add_row(str(layer), f"{count} of {experts}", _percent(part))
    table.add_row("all", f"{placed} of {total}", _percent(share))
    Console(highlight=False).print(table)


def _counts_of(source: Path, strategy: str) -> tuple[Counts, int | None, bool]:
    """Return counts, the number of all layers if it is known, and whether counts are of use."""
    if source.is_file() and source.suffix in (".json", ".pt"):
        counts = load_counts(source)
        if not counts:
            raise CheckpointError(f"{source} has counts of no layer")
        return counts, None, True
    if source.suffix in (".json", ".pt"):
        raise CheckpointError(f"{source} is missing, or no file")
    if strategy == "frequency":
        raise CheckpointError(
            f"{source} is no file of counts, which frequency needs: ktk.placement.save_counts "
            "writes one, or give another --strategy"
        )
    from ktk.checkpoint.open import open_checkpoint
    from ktk.hub import find_model
    from ktk.model import layers_of

    path = find_model(source)
    with open_checkpoint(path) as checkpoint:
        configs = {n: checkpoint.layer(n).config for n in layers_of(checkpoint, path)}
    counts = {n: np.zeros(one.num_experts, np.int64) for n, one in configs.items()}
    return counts, next(iter(configs.values())).num_layers, False


def _sum(counts: np.ndarray) -> int:
    """Return a sum that may be beyond 64 bits."""
    return sum(counts.tolist())


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"
