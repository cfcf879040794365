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
==================  ===========================================================================

Modules in the first two begin with ``base_model.model.``, which other writers leave out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from ktk.config import MoEConfig
from ktk.lora import Lora
from ktk.transformers.layout import Layout

PREFIX = "base_model.model."
_PARTS = ("gate", "up", "down")
_NUMBER = re.compile(r"(?:^|\.)layers\.(\d+)\.")

State = dict[str, torch.Tensor]


class AdapterError(ValueError):
    """The tensors of an adapter are not what the model's experts want."""


def to_peft(name: str, lora: Lora) -> State:
    """Return the factors of one module with a name for each expert."""
    state = {}
    for factor, value in lora.factors():
        part, side = factor.split("_")
        for expert, one in enumerate(value.detach()):
            key = f"{PREFIX}{name}.{expert}.{part}_proj.lora_{side.upper()}.weight"
            state[key] = one.contiguous()
    return state


def to_fused(name: str, lora: Lora, layout: Layout) -> State:
    """Return the factors of one module as those of transformers' tensors, of twice the rank.

    Gate and up are one matrix there, with one A: theirs stand in it one behind the other, and B has
    zeros for the other one's. That of down has zeros in its second half.
    """
    given = {factor: value.detach() for factor, value in lora.factors()}
    some = next(iter(given.values()))
    experts, rank = some.shape[0], lora.rank
    state = {}

    def put(path: str, a: torch.Tensor, b: torch.Tensor) -> None:
        state[f"{PREFIX}{path}.lora_A.weight"] = a.reshape(-1, a.shape[-1]).contiguous()
        # Experts are the fastest of the columns.
        flat = b.permute(1, 2, 0).reshape(b.shape[1], -1)
        state[f"{PREFIX}{path}.lora_B.weight"] = flat.contiguous()

    joined = any(f"{part}_a" in given for part in ("gate", "up"))
    if joined:
        known = given.get("gate_b", given.get("up_b"))
        assert known is not None
        width = known.shape[1]
        columns = given.get("gate_a", given.get("up_a")).shape[-1]  # type: ignore[union-attr]
        parts = ("gate", "up") if layout.gated else ("up",)
        a = some.new_zeros(experts, len(parts) * rank, columns)
        b = some.new_zeros(experts, len(parts) * width, len(parts) * rank)
        for at, part in enumerate(parts):
            if f"{part}_a" not in given:
                continue
            mine = slice(at * rank, (at + 1) * rank)
            a[:, mine] = given[f"{part}_a"]
            for expert in range(experts):
                layout.parts(b[expert])[part][:, mine] = given[f"{part}_b"][expert]
        put(name if "down_a" not in given else f"{name}.base_layer", a, b)
    if "down_a" in given:
        a = torch.cat([given["down_a"], torch.zeros_like(given["down_a"])], 1)
        b = torch.cat([given["down_b"], torch.zeros_like(given["down_b"])], 2)
        put(name, a, b)
    return state


def to_kt(name: str, lora: Lora) -> State:
    """Return the factors of one module by the number of its layer."""
    number = layer_of(name)
    return {
        f"layers.{number}.experts.{factor.replace('_', '_lora_')}": value.detach().contiguous()
        for factor, value in lora.factors()
    }


def layer_of(name: str) -> int:
    """Return the number of the layer that a module is in."""
    found = _NUMBER.search(name)
    if found is None:
        raise AdapterError(f"{name} is in no numbered layer, which kt-kernel's layout needs")
    return int(found[1])


def factors_of(
    name: str, state: Mapping[str, torch.Tensor], config: MoEConfig, layout: Layout
) -> State:
    """Return the factors of one module that an adapter has in any layout; none if it has none.

    Raises
    ------
    AdapterError
        Some are missing, or have another shape than the module wants.
    """
    state = {key.removeprefix(PREFIX): value for key, value in state.items()}
    found = _from_kt(name, state) or _from_peft(name, state, config.num_experts)
    found = found or _from_fused(name, state, config, layout)
    for factor, value in found.items():
        part, side = factor.split("_")
        rows, columns = config.intermediate_size, config.hidden_size
        if part == "down":
            rows, columns = columns, rows
        extents = (value.shape[0], value.shape[2] if side == "a" else value.shape[1])
        wanted = (config.num_experts, columns if side == "a" else rows)
        if extents != wanted:
            raise AdapterError(
                f"{factor} of {name} has shape {list(value.shape)}, which is no adapter of "
                f"{config.num_experts} experts of {config.hidden_size} x {config.intermediate_size}"
            )
    return found


def _from_kt(name: str, state: Mapping[str, torch.Tensor]) -> State:
    match = _NUMBER.search(name)
    if match is None:
        return {}
    keys = {
        f"{part}_{side}": f"layers.{match[1]}.experts.{part}_lora_{side}"
        for part in _PARTS
        for side in "ab"
    }
    return {factor: state[key] for factor, key in keys.items() if key in state}


def _from_peft(name: str, state: Mapping[str, torch.Tensor], experts: int) -> State:
    found = {}
    for part in _PARTS:
        for side in "ab":
            keys = [f"{name}.{e}.{part}_proj.lora_{side.upper()}.weight" for e in range(experts)]
            there = [key in state for key in keys]
            if all(there):
                found[f"{part}_{side}"] = torch.stack([state[key] for key in keys])
            elif any(there):
                missing = keys[there.index(False)]
                raise AdapterError(f"{missing} is missing, which other experts of {name} have")
    return found


def _from_fused(
    name: str, state: Mapping[str, torch.Tensor], config: MoEConfig, layout: Layout
) -> State:
    found: State = {}
    experts, h, i = config.num_experts, config.hidden_size, config.intermediate_size
    for path in (name, f"{name}.base_layer"):
        keys = [f"{path}.lora_{side}.weight" for side in "AB"]
        if not all(key in state for key in keys):
            continue
        a, b = (state[key] for key in keys)
        # How they are nested depends on the order in which they were named; shapes tell.
        first = (1 + config.gated) * i
        kind = {(h, first): "joined", (i, h): "down"}.get((a.shape[1], b.shape[0]))
        if kind is None or a.shape[0] % experts or b.shape[1] != a.shape[0]:
            raise AdapterError(
                f"{keys[0]} {list(a.shape)} and {keys[1]} {list(b.shape)} are no adapter of "
                f"{experts} experts of {h} x {i}"
            )
        a = a.reshape(experts, -1, a.shape[1])
        b = b.reshape(b.shape[0], -1, experts).permute(2, 0, 1).contiguous()
        if kind == "down":
            found |= {"down_a": a, "down_b": b}
            continue
        each = [layout.parts(one) for one in b]
        for part in each[0]:
            found |= {f"{part}_a": a, f"{part}_b": torch.stack([one[part] for one in each])}
    return found
