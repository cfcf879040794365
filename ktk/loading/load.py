"""Makes loaded `MoE`s from layers of a checkpoint.

Workers read what they pack where a backend takes what is stored: row by row, or an expert ahead of
packing it. Other weights a thread reads and decodes, one expert ahead of those that pack.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ktk._core import WorkerPool
from ktk.backend import Backend
from ktk.checkpoint.open import open_checkpoint
from ktk.checkpoint.reader import CheckpointReader
from ktk.config import MoEConfig
from ktk.expert import Expert
from ktk.loading.plan import LayerPlan, naming_layer, plan_layer
from ktk.loading.room import check_room
from ktk.loading.route import summaries
from ktk.moe import Formats, MoE
from ktk.registry import load_backend

_log = logging.getLogger(__name__)


def load_moe(
    path: str | Path,
    layer: int,
    backend: str | Backend | None = None,
    *,
    experts: Sequence[int] | None = None,
    physical_to_logical_map: Sequence[int] | None = None,
    module: str | None = None,
    activation: str | None = None,
    top_k: int | None = None,
    config: MoEConfig | None = None,
    variant: str | None = None,
    force: bool = False,
    pool: WorkerPool | None = None,
    shards: int | None = None,
    weight_format: Formats | None = None,
) -> MoE:
    """Load the routed experts of one layer.

    Experts are packed one after the other: in memory are the packed layer and at most two experts
    that are not read row by row, one of them being read. Where the backend does not take what the
    files hold, these are decoded to f32 and quantised, as `ktk convert` does, and a line of logging
    says so.

    Parameters
    ----------
    path
        Folder with config.json and safetensors files, as published; or a GGUF file, any file of a
        split one, or a folder that holds one model in GGUF files.
    layer
        Number of the layer in the model.
    backend
        A backend or its name. Default: the one that the format of the weights implies, see
        `ktk.loading.default_backend`.
    experts
        The slots to load; the others take no memory and contribute nothing. Default: all.
    physical_to_logical_map
        Slot p holds expert `physical_to_logical_map[p]` of the checkpoint. Default: p.
    module, activation, top_k
        As of `open_checkpoint`.
    config
        What the layer is, where it is to be other than the checkpoint says: an activation function
        that ktk knows instead of one that it does not. Sizes are the checkpoint's; with a map,
        there may be more slots than experts (redundant copies).
    variant, pool, shards, weight_format
        As of `ktk.MoE`.
    force
        Also load what seems to be more than memory can hold; and as of `ktk.MoE`.

    Raises
    ------
    CheckpointError
        Something is missing, damaged or not what config.json says; the message names it. A
        `CheckpointFormatError` where all is well, but the backend does not take such weights, and a
        `CheckpointTooLarge` where memory, or the cgroup's limit, cannot hold the layer.
    """
    if isinstance(backend, str):
        load_backend(backend)  # a name that is none is said before anything is read
    with open_checkpoint(path, module=module, activation=activation, top_k=top_k) as checkpoint:
        plan = plan_layer(
            checkpoint,
            operator.index(layer),
            backend,
            experts,
            physical_to_logical_map,
            {
                "variant": variant,
                "force": force,
                "pool": pool,
                "shards": shards,
                "weight_format": weight_format,
            },
            config,
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


def load_layers(
    checkpoint: CheckpointReader,
    plans: Sequence[LayerPlan],
    on_expert: Callable[[LayerPlan], None] = lambda plan: None,
    into: Mapping[int, MoE] | None = None,
) -> dict[int, MoE]:
    """Load layers one after the other, and return them by number.

    While the workers pack an expert, a thread reads the next one, unless it is left to the workers;
    so there are never more than two beside what is packed. When this ends, in whatever way, the
    thread has ended too.

    Parameters
    ----------
    checkpoint
        What the plans were made of.
    plans
        From `plan_layer`.
    on_expert
        Called after each expert, with the plan it belongs to.
    into
        Layers to load the experts into, by number; by default new ones.

    Raises
    ------
    CheckpointTooLarge
        See `check_room`.
    """
    check_room(plans)
    jobs = _read_ahead(checkpoint, plans)
    loaded = {}
    with ThreadPoolExecutor(1, thread_name_prefix="ktk-read") as reader:
        read: Future[Any] = reader.submit(next, jobs, None)
        for plan in plans:
            with naming_layer(plan.number):
                moe = into[plan.number] if into else plan.make()
                for slot in plan.slots:
                    expert = read.result()
                    read = reader.submit(next, jobs, None)
                    moe.load_expert(slot, expert)
                    del expert
                    on_expert(plan)
            loaded[plan.number] = moe
    return loaded


def _read_ahead(checkpoint: CheckpointReader, plans: Iterable[LayerPlan]) -> Iterator[Expert]:
    """Read all experts in the order they are packed in. This runs in the reading thread."""
    for plan in plans:
        for number, expert in enumerate(plan.slots.values(), 1):
            read = _read(plan, expert)
            if number == len(plan.slots):  # memory of reads goes before the last one is packed
                checkpoint.close()
            yield read
            del read


def _read(plan: LayerPlan, expert: int) -> Expert:
    return plan.route.unread(expert)
