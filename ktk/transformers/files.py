"""Packs the experts of a model straight from its files, which transformers does not read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ktk.checkpoint.open import open_checkpoint
from ktk.checkpoint.packed import PackedCheckpoint
from ktk.checkpoint.reader import CheckpointReader
from ktk.checkpoint.safetensors.index import TensorIndex
from ktk.config import activation_called
from ktk.errors import CheckpointError, CheckpointTooLarge
from ktk.loading.load import announce, load_layers
from ktk.loading.plan import LayerPlan, naming_layer, plan_layer
from ktk.loading.room import check_room
from ktk.progress import Progress
from ktk.registry import load_backend
from ktk.transformers.config import KtkConfig
from ktk.transformers.division import Division
from ktk.transformers.modules import Experts, by_layer, say_once
from ktk.transformers.packed import Packed, put

# Elements of codes, as safetensors spells them.
CODES = ("F8_", "F4", "U8", "I8", "I32")


@dataclass(frozen=True)
class FromFiles:
    """Experts that are to be packed from files, checked without reading weights.

    Attributes
    ----------
    checkpoint
        Holds them.
    layers
        What is to be packed, by the numbers of layers in the files.
    plans
        How, in the same order.
    division
        Over processes, if they divide the experts.
    """

    checkpoint: CheckpointReader
    layers: dict[int, Experts]
    plans: list[LayerPlan]
    division: Division | None = None

    def load(self, model: Any) -> None:
        """Read and pack the experts, and put them into their modules."""
        announce(self.checkpoint.path, self.plans)
        total = sum(len(plan.slots) * plan.expert_nbytes for plan in self.plans)
        with self.checkpoint, Progress(total) as shown:

            def on_expert(plan: LayerPlan) -> None:
                shown.advance(plan.expert_nbytes, f"layer {plan.number} ({plan.backend.name})")

            loaded = load_layers(self.checkpoint, self.plans, on_expert)
        for number, one in self.layers.items():
            moe = loaded[number]
            compute = (
                None if self.division is None else self.division.divide(moe, one.module, model)
            )
            put(one.module, Packed(moe, one.layout, one.name, compute))


def plan_files(
    experts: Sequence[Experts],
    files: Sequence[str] | None,
    config: KtkConfig,
    division: Division | None = None,
) -> FromFiles | None:
    """Plan to pack experts from the files that a model is loaded from.

    Parameters
    ----------
    experts
        The modules of the model.
    files
        What transformers reads the other weights from.
    config
        Says which backend computes, and may name another place for experts.
    division
        Says which experts are of this process, if not all.

    Returns
    -------
    FromFiles or None
        None: transformers has to load the experts; a warning says why.

    Raises
    ------
    BackendError
        The backend cannot be used.
    CheckpointError
        The experts are not where `config` says; or memory will not do.
    """
    if config.backend is not None:
        load_backend(config.backend)  # a name that is none is said before anything is read
    layers = by_layer(experts)
    if not layers or not (files or config.experts):
        return None
    try:
        checkpoint = open_checkpoint(config.experts or _root(files or ()))
        with checkpoint:
            if not config.experts:
                _check_same(checkpoint, files or ())
            plans = [
                _plan(checkpoint, number, one, config, division) for number, one in layers.items()
            ]
    except CheckpointTooLarge:
        raise
    except (CheckpointError, ValueError) as error:
        if config.experts:
            raise
        say_once(
            f"transformers loads the experts before ktk packs them, which takes the memory of both "
            f"for a layer: {error}"
        )
        return None
    check_room(plans)
    return FromFiles(checkpoint, layers, plans, division)


def only_experts_in_codes(folder: Path) -> bool:
    """Whether no tensor of a folder but those of experts is quantised; False if nobody can tell."""
    try:
        with TensorIndex(folder) as index:
            others = [name for name in index.names() if ".experts." not in name]
            return not any(index.dtype(name).startswith(CODES) for name in others)
    except CheckpointError:
        return False


def _root(files: Sequence[str]) -> Path:
    first = Path(files[0])
    return first if first.suffix == ".gguf" else first.parent


def _check_same(checkpoint: CheckpointReader, files: Sequence[str]) -> None:
    """Refuse a folder that holds other weights than transformers was told to load."""
    weights = {path.name for path in checkpoint.files() if path.suffix == ".safetensors"}
    others = sorted(weights - {Path(file).name for file in files})
    if others:
        raise CheckpointError(f"{checkpoint.path} also holds {others[0]}, which is not loaded")


def _check_function(checkpoint: CheckpointReader, one: Experts) -> None:
    """Refuse files that were converted for another activation function than the module has."""
    said = checkpoint.index.activation if isinstance(checkpoint, PackedCheckpoint) else None
    if said is not None and activation_called(said) != one.config.activation:
        raise CheckpointError(
            f"{checkpoint.path} was converted with --activation {said}, and the model computes "
            f"{one.config.activation}: convert it again without that"
        )


def _plan(
    checkpoint: CheckpointReader,
    number: int,
    one: Experts,
    config: KtkConfig,
    division: Division | None,
) -> LayerPlan:
    """Plan a layer that computes what its module would: sizes have to agree."""
    with naming_layer(number):
        _check_function(checkpoint, one)
        there = checkpoint.layer(number).config
        # Of these two transformers knows k from calls only, and nothing in a GGUF file of Qwen3.
        wanted = replace(
            one.config,
            num_experts_per_tok=there.num_experts_per_tok,
            intermediate_size=there.intermediate_size,
        )
        mine = None if division is None else division.experts(there.num_experts)
        return plan_layer(checkpoint, number, config.backend, mine, None, {}, wanted)
