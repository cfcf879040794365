"""Refuses to load what memory cannot hold, before the kernel ends the process for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from ktk.checkpoint.spans import spans
from ktk.errors import BackendError, CheckpointFormatError, CheckpointTooLarge
from ktk.loading.plan import LayerPlan
from ktk.loading.route import route_of
from ktk.registry import backends, load_backend
from ktk.sizes import size_text
from ktk.system import available_memory

# Experts that are in memory beside what is packed, one of them being read; as f32 at worst.
_BESIDE = 2


def check_room(plans: Sequence[LayerPlan]) -> None:
    """Compare what layers will take with what is available.

    Raises
    ------
    CheckpointTooLarge
        It is more; the message has both sizes, and what would fit.
    """
    if not plans or any(plan.options.get("force") for plan in plans):
        return
    available = available_memory()
    beside = max(map(_beside, plans))
    sizes = [len(plan.slots) * plan.route.packed_nbytes for plan in plans]
    needed = sum(sizes) + beside
    if needed <= available:
        return
    names = ", ".join(dict.fromkeys(plan.backend.name for plan in plans))
    layers = [plan.number for plan in plans]
    fitting = [
        *(f"{name} ({size_text(size)})" for name, size in _others(plans, available)),
        *_part(plans, sizes, available - beside),
    ]
    raise CheckpointTooLarge(
        f"layer{'s' * (len(layers) > 1)} {spans(layers)} for {names} would take "
        f"{size_text(needed)} of memory, and {size_text(available)} are available. "
        f"{'What fits: ' + ', or '.join(fitting) if fitting else 'No part of it fits'}. "
        "force=True loads it all the same"
    )


def _beside(plan: LayerPlan) -> int:
    return _BESIDE * sum(4 * one.n * one.k for one in plan.route.source.values())


def _others(plans: Sequence[LayerPlan], available: int) -> Iterator[tuple[str, int]]:
    """Yield other backends that all of it fits for, the largest and so most exact first."""
    found = []
    mine = {plan.backend.name for plan in plans}
    for name in backends():
        try:
            backend = load_backend(name)
            size = max(map(_beside, plans)) + sum(
                len(plan.slots) * route_of(plan.route.layer, backend).packed_nbytes
                for plan in plans
            )
        except (BackendError, CheckpointFormatError):
            continue
        if size <= available and mine != {name}:
            found.append((name, size))
    yield from sorted(found, key=lambda one: (-one[1], one[0]))


def _part(plans: Sequence[LayerPlan], sizes: Sequence[int], room: int) -> Iterator[str]:
    """Say how many of the layers fit, or of the experts if there is one layer only."""
    if len(plans) > 1:
        count = sum(total <= room for total in accumulate(sizes))
        if count:
            first = spans([plan.number for plan in plans[:count]])
            yield f"the first {count} of {len(plans)} layers (layers={first})"
        return
    [plan] = plans
    count = max(room, 0) // plan.route.packed_nbytes
    if count:
        yield f"{count} of its {len(plan.slots)} experts (experts=)"
