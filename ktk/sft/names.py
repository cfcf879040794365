"""What files of adapters call factors of experts, and how they lay them out.

==================  ===========================================================================
layout              tensors of one layer
==================  ===========================================================================
``peft``            ``{module}.{e}.{gate,up,down}_proj.lora_{A,B}.weight`` for each expert, as PEFT
                    has them for experts that are modules: [rank, columns] and [rows, rank]
``peft-fused``      ``{module}[.base_layer].lora_{A,B}.weight``, as PEFT's `target_parameters` has
                    them for transformers' own tensors: A [experts * rank, columns] and
                    B [rows, rank * experts], of gate and up as one matrix, and of down
``kt``              ``layers.{i}.experts.{gate,up,down}_lora_{a,b}``, as kt-kernel has them
``parameters``      ``{module}.{gate,up,down}_lora_{a,b}``, as modules call their parameters, and
                    ``{module}.lora_scale``, float64: each module keeps its rank and scale
==================  ===========================================================================

Modules in ``peft`` and ``peft-fused`` begin with ``base_model.model.``, which other writers leave
out. Mixtral's experts are also found by the names that they had before transformers 5, as
``block_sparse_moe.experts.{e}.{w1,w3,w2}``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from ktk.config import PARTS, MoEConfig
from ktk.lora import Lora
from ktk.sft.folders import PREFIX, AdapterError, Written
from ktk.sft.pairs import Pair
from ktk.transformers.adapter import parameter_of
from ktk.transformers.layout import Layout

# What modules of one expert call these, and where they are, by the name that transformers has now.
_PROJECTIONS = (
    ("", "", ("gate_proj", "up_proj", "down_proj")),
    (".mlp.experts", ".block_sparse_moe.experts", ("w1", "w3", "w2")),
)
_SCALE = "lora_scale"
_NUMBER = re.compile(r"(?:^|\.)layers\.(\d+)\.")

State = dict[str, torch.Tensor]


def to_peft(name: str, lora: Lora) -> State:
    """Return the factors of one module with a name for each expert."""
    state = {}
    for factor, value in lora.factors():
        part, side = factor.split("_")
        for expert, one in enumerate(value.detach()):
            key = f"{PREFIX}{name}.{expert}.{part}_proj.lora_{side.upper()}.weight"
            state[key] = one.contiguous()
    return state


def to_fused(name: str, lora: Lora, layout: Layout, zero_experts: int = 0) -> State:
    """Return the factors of one module as those of transformers' tensors, of `fused_rank`.

    Gate and up are one matrix there, with one A: theirs stand in it one behind the other, and B has
    zeros for the other one's. That of down has zeros in its second half. Zero experts, which the
    first matrix has rows for, have zeros.
    """
    given = {factor: value.detach() for factor, value in lora.factors()}
    some = next(iter(given.values()))
    experts, rank, whole = some.shape[0], lora.rank, fused_rank(lora, layout)
    state = {}

    def put(path: str, a: torch.Tensor, b: torch.Tensor) -> None:
        state[f"{PREFIX}{path}.lora_A.weight"] = a.reshape(-1, a.shape[-1]).contiguous()
        # Experts are the fastest of the columns.
        flat = b.permute(1, 2, 0).reshape(b.shape[1], -1)
        state[f"{PREFIX}{path}.lora_B.weight"] = flat.contiguous()

    parts = ("gate", "up") if layout.gated else ("up",)
    joined = [part for part in parts if f"{part}_a" in given]
    if joined:
        width, columns = given[f"{joined[0]}_b"].shape[1], given[f"{joined[0]}_a"].shape[-1]
        slots = experts + zero_experts
        a = some.new_zeros(slots, whole, columns)
        b = some.new_zeros(slots, len(parts) * width, whole)
        for part in joined:
            at = parts.index(part) * rank
            mine = slice(at, at + rank)
            a[:experts, mine] = given[f"{part}_a"]
            for expert in range(experts):
                layout.parts(b[expert])[part][:, mine] = given[f"{part}_b"][expert]
        put(name if "down_a" not in given else f"{name}.base_layer", a, b)
    if "down_a" in given:
        a = some.new_zeros(experts, whole, given["down_a"].shape[-1])
        b = some.new_zeros(experts, given["down_b"].shape[1], whole)
        a[:, :rank], b[:, :, :rank] = given["down_a"], given["down_b"]
        put(name, a, b)
    return state


def fused_rank(lora: Lora, layout: Layout) -> int:
    """Return the rank in ``peft-fused``: gate and up, which have one A there, need both theirs."""
    return lora.rank * (2 if layout.gated else 1)


def to_kt(name: str, lora: Lora) -> State:
    """Return the factors of one module by the number of its layer."""
    number = layer_of(name)
    return {
        f"layers.{number}.experts.{factor.replace('_', '_lora_')}": value.detach().contiguous()
        for factor, value in lora.factors()
    }


def to_parameters(name: str, lora: Lora) -> State:
    """Return the factors of one module by the names of its parameters, and its scale."""
    state = {
        f"{name}.{parameter_of(factor)}": value.detach().contiguous()
        for factor, value in lora.factors()
    }
    state[f"{name}.{_SCALE}"] = torch.tensor(lora.scale, dtype=torch.float64, device="cpu")
    return state


def layer_of(name: str) -> int:
    """Return the number of the layer that a module is in."""
    found = _NUMBER.search(name)
    if found is None:
        raise AdapterError(f"{name} is in no numbered layer, which kt-kernel's layout needs")
    return int(found[1])


def pairs_of(name: str, found: Written, config: MoEConfig, layout: Layout) -> dict[str, list[Pair]]:
    """Return the factors of one module that an adapter has in any layout, those of each expert.

    By "gate", "up" and "down"; none if it has none.

    Raises
    ------
    AdapterError
        Some are missing, or have another shape than the module wants.
    """
    every = (
        _from_parameters(name, found, config),
        _from_kt(name, found, config),
        _from_peft(name, found, config),
        _from_fused(name, found, config, layout),
    )
    given = [parts for parts in every if parts]
    if len(given) > 1:
        raise AdapterError(
            f"{found.path.parent} has factors of {name} by two kinds of names: remove one file, or "
            "save the adapter again, to a new folder"
        )
    return given[0] if given else {}


def _extents(part: str, config: MoEConfig) -> tuple[int, int]:
    """Return rows and columns of a matrix."""
    rows, columns = config.intermediate_size, config.hidden_size
    return (columns, rows) if part == "down" else (rows, columns)


def _both(found: Written, first: str, second: str) -> bool:
    """Tell whether there are two tensors that belong together, rather than neither."""
    if (first in found) != (second in found):
        missing, there = (second, first) if first in found else (first, second)
        raise found.missing(missing, there)
    return first in found


def _of_all_experts(
    part: str, found: Written, keys: Sequence[str], config: MoEConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the factors A and B of a matrix that all experts have."""
    rows, columns = _extents(part, config)
    a = found.take(keys[0], config.num_experts, None, columns)
    return a, found.take(keys[1], config.num_experts, rows, a.shape[1])


def _from_parameters(name: str, found: Written, config: MoEConfig) -> dict[str, list[Pair]]:
    parts = {}
    for part in config.parts:
        keys = [f"{name}.{parameter_of(f'{part}_{side}')}" for side in "ab"]
        if not _both(found, *keys):
            continue
        if f"{name}.{_SCALE}" not in found:
            raise found.missing(f"{name}.{_SCALE}", keys[0])
        both = _of_all_experts(part, found, keys, config)
        scale = found.number(f"{name}.{_SCALE}")
        parts[part] = [Pair(a, b, scale) for a, b in zip(*both, strict=True)]
    return parts


def _from_kt(name: str, found: Written, config: MoEConfig) -> dict[str, list[Pair]]:
    match = _NUMBER.search(name)
    if match is None:
        return {}
    parts = {}
    for part in config.parts:
        keys = [f"layers.{match[1]}.experts.{part}_lora_{side}" for side in "ab"]
        if not _both(found, *keys):
            continue
        found.check_not_taken(keys[0], f"experts in two modules of layer {match[1]}")
        both = _of_all_experts(part, found, keys, config)
        scale = found.scale(f"{name}.{part}_proj", both[0].shape[1])
        parts[part] = [Pair(a, b, scale) for a, b in zip(*both, strict=True)]
    return parts


def _from_peft(name: str, found: Written, config: MoEConfig) -> dict[str, list[Pair]]:
    parts: dict[str, list[Pair]] = {}
    for here, there, projections in _PROJECTIONS:
        where = f"{name.removesuffix(here)}{there}" if name.endswith(here) else name
        for part, projection in zip(PARTS, projections, strict=True):
            if part not in config.parts:
                continue
            paths = [f"{where}.{e}.{projection}" for e in range(config.num_experts)]
            keys = [[f"{path}.lora_{side}.weight" for side in "AB"] for path in paths]
            present = [key[0] for key in keys if _both(found, *key)]
            if not present:
                continue
            rows, columns = _extents(part, config)
            parts[part] = []
            for path, (first, second) in zip(paths, keys, strict=True):
                if first not in found:
                    raise found.missing(first, present[0])
                a = found.take(first, None, columns)
                b = found.take(second, rows, len(a))
                parts[part].append(Pair(a, b, found.scale(path, len(a))))
    return parts


def _from_fused(
    name: str, found: Written, config: MoEConfig, layout: Layout
) -> dict[str, list[Pair]]:
    parts: dict[str, list[Pair]] = {}
    h, i = config.hidden_size, config.intermediate_size
    first, second = layout.weights
    for path in (name, f"{name}.base_layer"):
        keys = [f"{path}.lora_{side}.weight" for side in "AB"]
        if not _both(found, *keys):
            continue
        # How they are nested depends on the order in which they were named; shapes tell.
        a, b = (found.take(key, None, None) for key in keys)
        rows = (1 + config.gated) * i
        if (h, rows) == (i, h):
            raise AdapterError(
                f"{found.path.parent}: {keys[0]} is of {first} or of {second}, which both are "
                f'{h} x {i} here: save the adapter with layout="peft", where names tell'
            )
        kind = {(h, rows): first, (i, h): second}.get((a.shape[1], b.shape[0]))
        slots = config.num_ids if kind == first else config.num_experts
        if kind is None or a.shape[0] % slots or b.shape[1] != a.shape[0]:
            raise AdapterError(
                f"{found.path.parent}: {keys[0]} {list(a.shape)} and {keys[1]} {list(b.shape)} are "
                f"no adapter of {config.num_experts} experts of {h} x {i}"
            )
        scale = found.scale(f"{name}.{kind}", a.shape[0] // slots)
        # Those of zero experts, behind the others, have no matrix.
        each_a = a.reshape(slots, -1, a.shape[1])[: config.num_experts]
        each_b = b.reshape(b.shape[0], -1, slots).permute(2, 0, 1)[: config.num_experts]
        for one_a, one_b in zip(each_a, each_b, strict=True):
            split = {"down": one_b} if kind == second else layout.parts(one_b)
            for part, rows_of in split.items():
                parts.setdefault(part, []).append(Pair(one_a, rows_of, scale))
    return parts
