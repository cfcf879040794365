"""All layers of experts of a model."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ktk._core import WorkerPool
from ktk.config import MoEConfig
from ktk.moe import Formats, MoE

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from ktk.backend import Backend
    from ktk.checkpoint.reader import CheckpointReader
    from ktk.loading.plan import LayerPlan

T = TypeVar("T")
# Of one layer, or of each.
Experts = Sequence[int] | Mapping[int, Sequence[int]]


class Model(Mapping[int, MoE]):
    """The layers of experts of a model, by their numbers: ``model[3](hidden, ids, weights)``.

    Parameters
    ----------
    layers : mapping of int to MoE
        By number; :meth:`from_checkpoint` makes them.
    """

    def __init__(self, layers: Mapping[int, MoE]) -> None:
        self._layers = dict(sorted(layers.items()))

    @classmethod
    def from_checkpoint(
        cls,
        path: str | Path,
        backend: str | Backend | None = None,
        *,
        layers: Sequence[int] | None = None,
        experts: Experts | None = None,
        physical_to_logical_map: Experts | None = None,
        module: str | None = None,
        activation: str | None = None,
        top_k: int | None = None,
        config: MoEConfig | Mapping[int, MoEConfig] | None = None,
        variant: str | None = None,
        force: bool = False,
        pool: WorkerPool | None = None,
        shards: int | None = None,
        weight_format: Formats | None = None,
        progress: bool | None = None,
    ) -> Model:
        """Load the experts of a checkpoint.

        All layers are checked before the first is loaded. Then experts are packed one by one.
        Workers read what a backend takes as it is stored; where weights are decoded first, the next
        expert is being read meanwhile. Beside what is packed, memory holds at most two of them and
        some 32 MiB of what was read.

        Parameters
        ----------
        path : path
            As of :meth:`MoE.from_checkpoint`.
        backend : str or Backend, optional
            What computes all layers. By default the format of the weights decides, for each layer.
        layers : sequence of int, optional
            Which to load. By default all that have experts, without those behind the model's last
            layer, which predict further tokens (MTP).
        experts : sequence of int, or a mapping of layers to such, optional
            The slots to load; the others take no memory and contribute nothing. By default all; so
            for layers that a mapping lacks.
        physical_to_logical_map : sequence of int, or a mapping of layers to such, optional
            Slot p holds expert ``physical_to_logical_map[p]`` of the checkpoint. By default p.
        module : str, optional
            The module that has the experts, where several parts of a model have some: words in the
            middle of their tensors' names, ``"talker"`` of Qwen3-Omni. By default that of the
            language model.
        activation : str, optional
            The activation function, where it is not what the files say, or ktk does not know it: of
            a GGUF file whose architecture is new.
        top_k : int, optional
            Of GGUF files, experts that a token goes to, where the metadata does not say it.
        config : MoEConfig, or a mapping of layers to such, optional
            As of :meth:`MoE.from_checkpoint`.
        force : bool
            Also load what seems to be more than memory can hold; and as of :class:`MoE`.
        variant, pool, shards, weight_format
            As of :class:`MoE`, for all layers.
        progress : bool, optional
            Whether to show on stderr how far loading is: a bar on a terminal, elsewhere a line for
            each layer. By default only on a terminal.

        Raises
        ------
        CheckpointError
            Something is missing, damaged or not what the configuration says; the message names the
            layer and the tensor.
        CheckpointTooLarge
            Memory, or the cgroup's limit, cannot hold the layers. The message has both sizes, and
            what would fit. Nothing was loaded.
        """
        from ktk.checkpoint.open import open_checkpoint
        from ktk.loading.load import announce, load_layers
        from ktk.loading.plan import naming_layer, plan_layer
        from ktk.progress import Progress
        from ktk.registry import load_backend

        options = {
            "variant": variant,
            "force": force,
            "pool": pool,
            "shards": shards,
            "weight_format": weight_format,
        }
        if isinstance(backend, str):
            load_backend(backend)  # a name that is none is said before anything is read
        elif backend is not None and not hasattr(backend, "core"):
            raise TypeError(
                f"backend must be a name or a Backend of ktk.load_backend, got {backend!r}"
            )
        with open_checkpoint(path, module=module, activation=activation, top_k=top_k) as checkpoint:
            numbers = layers_of(checkpoint, path) if layers is None else map(operator.index, layers)
            wanted, plans = list(dict.fromkeys(numbers)), []
            of_layers = {
                "experts": experts,
                "physical_to_logical_map": physical_to_logical_map,
                "config": config,
            }
            known = checkpoint.layers()
            for name, value in of_layers.items():
                _check_layers(name, value, known)
            for number in wanted:
                with naming_layer(number):
                    plans.append(
                        plan_layer(
                            checkpoint,
                            number,
                            backend,
                            _of_layer(experts, number),
                            _of_layer(physical_to_logical_map, number),
                            options,
                            _of_layer(config, number),
                        )
                    )
            checkpoint.close()
            announce(path, plans)
            total = sum(len(plan.slots) * plan.expert_nbytes for plan in plans)
            with Progress(total, shown=progress) as shown:

                def on_expert(plan: LayerPlan) -> None:
                    name = f"layer {plan.number} ({plan.backend.name})"
                    shown.advance(plan.expert_nbytes, name)

                return cls(load_layers(checkpoint, plans, on_expert))

    @property
    def layers(self) -> tuple[int, ...]:
        """Numbers of the layers, ascending."""
        return tuple(self._layers)

    @property
    def nbytes(self) -> int:
        """Packed bytes of all experts that are loaded."""
        return sum(moe.nbytes for moe in self._layers.values())

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """How often tokens chose each expert, int64 [layers, experts]; rows as of `layers`.

        See :attr:`ktk.MoE.counts`; :func:`ktk.placement.save_counts` writes them to a file.

        Raises
        ------
        ValueError
            Layers have different numbers of experts: ask each one.
        """
        import numpy as np

        sizes = sorted({moe.config.num_experts for moe in self._layers.values()})
        if len(sizes) > 1:
            raise ValueError(f"layers have {sizes} experts: ask each one for its counts")
        if not sizes:
            return np.zeros((0, 0), np.int64)
        return np.stack([moe.counts for moe in self._layers.values()])

    def reset_counts(self) -> None:
        """Count from 0 again, in all layers."""
        for moe in self._layers.values():
            moe.reset_counts()

    def __getitem__(self, layer: int) -> MoE:
        try:
            return self._layers[layer]
        except KeyError:
            from ktk.checkpoint.spans import spans

            raise KeyError(
                f"layer {layer} is not loaded; loaded are {spans(list(self._layers)) or 'none'}"
            ) from None

    def __iter__(self) -> Iterator[int]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    def __repr__(self) -> str:
        names = ", ".join(dict.fromkeys(moe.backend.name for moe in self._layers.values()))
        return f"<ktk.Model {names}: {len(self)} layers, {self.nbytes / 2**20:.0f} MiB>"


def layers_of(checkpoint: CheckpointReader, path: str | Path) -> list[int]:
    """Return the layers that have experts and that the model runs for each token."""
    from ktk.errors import CheckpointError

    numbers = checkpoint.layers()
    if not numbers:
        raise CheckpointError(f"{path} has no experts that ktk knows by name")
    last = checkpoint.layer(numbers[0]).config.num_layers
    return [number for number in numbers if last is None or number < last] or numbers


def _check_layers(name: str, value: Any, layers: Collection[int]) -> None:
    """Refuse a mapping with an entry for what is no layer, such as the text of its number."""
    wrong = [key for key in value if key not in layers] if isinstance(value, Mapping) else ()
    if wrong:
        raise ValueError(
            f"{name} has an entry for {wrong[0]!r}, and the checkpoint no such layer: layers are "
            f"numbers, as {next(iter(layers), 0)}"
        )


def _of_layer(value: Mapping[int, T] | T | None, number: int) -> T | None:
    return value.get(number) if isinstance(value, Mapping) else value
