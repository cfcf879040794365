"""Plans the loading of a layer: which backend, which experts, and how they get there."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from ktk.backend import Backend
from ktk.checkpoint.reader import CheckpointReader
from ktk.config import MoEConfig
from ktk.errors import BackendError, CheckpointError
from ktk.loading.default import default_backend
from ktk.loading.route import Route, chooser, format_named_by, route_of
from ktk.moe import MoE
from ktk.registry import load_backend


@dataclass(frozen=True)
class LayerPlan:
    """What is to be loaded for one layer, checked without reading it.

    Attributes
    ----------
    number
        Of the layer.
    backend
        What computes it.
    config
        Of the layer.
    options
        Other keywords of `Backend.moe`.
    slots
        Which expert of the checkpoint goes to which slot.
    route
        How experts get from the files into the backend.
    expert_nbytes
        Bytes of one expert in the files.
    """

    number: int
    backend: Backend
    config: MoEConfig
    options: Mapping[str, Any]
    slots: dict[int, int]
    route: Route
    expert_nbytes: int

    def make(self) -> MoE:
        """Return the layer without its experts."""
        moe = self.backend.moe(**asdict(self.config), **self.options)
        for slot in range(self.config.num_experts):
            if slot not in self.slots:
                moe.leave_out(slot)
        return moe


def plan_layer(
    checkpoint: CheckpointReader,
    number: int,
    backend: str | Backend | None,
    experts: Sequence[int] | None,
    physical_to_logical_map: Sequence[int] | None,
    options: Mapping[str, Any],
    config: MoEConfig | None = None,
) -> LayerPlan:
    """Check that a layer can be loaded.

    Parameters as of `load_moe`; `options` are the keywords of `Backend.moe` but for the fields of
    `MoEConfig`.
    """
    found = checkpoint.layer(number)
    count = found.config.num_experts
    made_with = found.config.layer(config, mapped=physical_to_logical_map is not None)
    slots = _slots(count, made_with.num_experts, experts, physical_to_logical_map)
    chosen = load_backend(backend) if isinstance(backend, str) else backend
    chosen = chosen or default_backend(found)
    choose = chooser(chosen, options.get("weight_format"), format_named_by(backend))
    return LayerPlan(
        number=number,
        backend=chosen,
        config=made_with,
        options=options,
        slots=slots,
        route=route_of(found, chosen, choose),
        expert_nbytes=found.nbytes // count,
    )


@contextmanager
def naming_layer(number: int) -> Iterator[None]:
    """Put the layer's number before the message of an error that ktk foresaw."""
    try:
        yield
    except BackendError as error:
        named = f"layer {number}: {error}"
        raise type(error)(named, brief=error.brief, advice=error.advice) from error
    except CheckpointError as error:
        raise type(error)(f"layer {number}: {error}") from error
    except ValueError as error:
        raise ValueError(f"layer {number}: {error}") from error


def _slots(
    count: int, slots: int, experts: Sequence[int] | None, logical: Sequence[int] | None
) -> dict[int, int]:
    """Return which of the checkpoint's `count` experts goes to which of the slots."""
    wanted = list(range(slots)) if experts is None else [operator.index(slot) for slot in experts]
    of_slot = list(range(count)) if logical is None else [operator.index(e) for e in logical]
    if len(of_slot) != slots:
        raise ValueError(f"physical_to_logical_map has {len(of_slot)} entries, expected {slots}")
    ranges = (("experts", wanted, slots), ("physical_to_logical_map", of_slot, count))
    for name, values, end in ranges:
        bad = [value for value in values if not 0 <= value < end]
        if bad:
            raise ValueError(f"{name} has {bad[0]}, expected 0 <= expert < {end}")
    return {slot: of_slot[slot] for slot in wanted}
