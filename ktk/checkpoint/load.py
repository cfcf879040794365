"""Makes loaded `MoE`s from layers of a checkpoint: one thread reads while the workers pack."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktk.checkpoint.default import default_backend
from ktk.checkpoint.open import OpenCheckpoint, open_checkpoint
from ktk.checkpoint.room import check_room
from ktk.checkpoint.route import Route, chooser, format_named_by, route_of, summaries
from ktk.errors import BackendError, CheckpointError
from ktk.registry import load_backend

if TYPE_CHECKING:
    from ktk.backend import Backend
    from ktk.moe import MoE

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LayerPlan:
    """What is to be loaded for one layer, checked without reading it.

    Attributes
    ----------
    number
        Of the layer.
    backend
        What computes it.
    arguments
        For `Backend.moe`.
    slots
        Which expert of the checkpoint goes to which slot.
    route
        How experts get from the files into the backend.
    expert_nbytes
        Bytes of one expert in the files.
    """

    number: int
    backend: Backend
    arguments: dict[str, Any]
    slots: dict[int, int]
    route: Route
    expert_nbytes: int

    def make(self) -> MoE:
        """Return the layer without its experts."""
        moe = self.backend.moe(**self.arguments)
        for slot in range(self.arguments["num_experts"]):
            if slot not in self.slots:
                moe.leave_out(slot)
        return moe


def load_moe(
    path: str | Path,
    layer: int,
    backend: str | Backend | None = None,
    *,
    experts: Sequence[int] | None = None,
    physical_to_logical_map: Sequence[int] | None = None,
    **options: Any,
) -> MoE:
    """Load the routed experts of one layer.

    Experts are packed one after the other: in memory are the packed layer and at most two experts,
    one of them being read. Where the backend does not take what the files hold, these are decoded
    to f32 and quantised, as `ktk convert` does, and a line of logging says so.

    Parameters
    ----------
    path
        Folder with config.json and safetensors files, as published; or a GGUF file, any file of a
        split one, or a folder that holds one model in GGUF files.
    layer
        Number of the layer in the model.
    backend
        A backend or its name. Default: the one that the format of the weights implies, see
        `ktk.checkpoint.default_backend`.
    experts
        The slots to load; the others take no memory and contribute nothing. Default: all.
    physical_to_logical_map
        Slot p holds expert `physical_to_logical_map[p]` of the checkpoint. Default: p. With a map,
        ``num_experts=`` may ask for more slots than the checkpoint has experts: redundant copies.
    **options
        For `Backend.moe`: variant, pool, shards, ... ``force=True`` loads even what seems to be
        more than memory can hold. The sizes come from config.json or the
        metadata of the GGUF file; so does the activation function unless it is given here.

    Raises
    ------
    CheckpointError
        Something is missing, damaged or not what config.json says; the message names it. A
        `CheckpointFormatError` where all is well, but the backend does not take such weights, and a
        `CheckpointTooLarge` where memory, or the cgroup's limit, cannot hold the layer.
    """
    if isinstance(backend, str):
        load_backend(backend)  # a name that is none is said before anything is read
    with open_checkpoint(path) as checkpoint:
        plan = plan_layer(
            checkpoint, operator.index(layer), backend, experts, physical_to_logical_map, options
        )
        announce(path, [plan])
        return load_layers(checkpoint, [plan])[plan.number]


# What was said, of which files: layers that are loaded one by one are mostly alike.
_said: set[tuple[str, str]] = set()


def announce(path: str | Path, plans: Sequence[LayerPlan]) -> None:
    """Log what becomes of the weights; a warning, once for a checkpoint, if codes become others."""
    for line, again in summaries({plan.number: plan.route for plan in plans}):
        _, _, what = line.partition(": ")
        warn = again and (str(path), what) not in _said
        _said.add((str(path), what))
        _log.log(logging.WARNING if warn else logging.INFO, "%s, %s", path, line)


def plan_layer(
    checkpoint: OpenCheckpoint,
    number: int,
    backend: str | Backend | None,
    experts: Sequence[int] | None,
    physical_to_logical_map: Sequence[int] | None,
    options: dict[str, Any],
) -> LayerPlan:
    """Check that a layer can be loaded; parameters as of `load_moe`."""
    found = checkpoint.layer(number)
    config = checkpoint.config_of(found)
    size = {"num_experts": config.num_experts}
    if physical_to_logical_map is not None and "num_experts" in options:
        options = dict(options)
        size["num_experts"] = operator.index(options.pop("num_experts"))
    slots = _slots(config.num_experts, size["num_experts"], experts, physical_to_logical_map)
    chosen = load_backend(backend) if isinstance(backend, str) else backend
    chosen = chosen or default_backend(checkpoint, found)
    choose = chooser(chosen, options.get("weight_format"), format_named_by(backend))
    return LayerPlan(
        number=number,
        backend=chosen,
        arguments=config.arguments(**options) | size,
        slots=slots,
        route=route_of(checkpoint, found, chosen, choose),
        expert_nbytes=checkpoint.nbytes(found) // config.num_experts,
    )


def load_layers(
    checkpoint: OpenCheckpoint,
    plans: Sequence[LayerPlan],
    on_expert: Callable[[LayerPlan], None] = lambda plan: None,
) -> dict[int, MoE]:
    """Load layers one after the other, and return them by number.

    While the workers pack an expert, a thread reads the next one, so there are never more than two
    beside what is packed. When this ends, in whatever way, the thread has ended too.

    Parameters
    ----------
    checkpoint
        What the plans were made of.
    plans
        From `plan_layer`.
    on_expert
        Called after each expert, with the plan it belongs to.

    Raises
    ------
    CheckpointTooLarge
        See `check_room`.
    """
    check_room(checkpoint, plans)
    jobs = _read_ahead(checkpoint, plans)
    loaded = {}
    with ThreadPoolExecutor(1, thread_name_prefix="ktk-read") as reader:
        read: Future[dict[str, Any]] = reader.submit(next, jobs, {})
        for plan in plans:
            with naming_layer(plan.number):
                moe = plan.make()
                for slot in plan.slots:
                    arrays = read.result()
                    read = reader.submit(next, jobs, {})
                    moe.load_expert(slot, **arrays)
                    del arrays
                    on_expert(plan)
            loaded[plan.number] = moe
    return loaded


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


def _read_ahead(checkpoint: OpenCheckpoint, plans: Iterable[LayerPlan]) -> Iterator[dict[str, Any]]:
    """Read all experts in the order they are packed in. This runs in the reading thread."""
    for plan in plans:
        for expert in plan.slots.values():
            yield _read(plan, expert)
        checkpoint.release()


def _read(plan: LayerPlan, expert: int) -> dict[str, Any]:
    return dict(plan.route.expert(expert))


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
