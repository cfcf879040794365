"""A layer of experts on the CPU."""

from __future__ import annotations

import functools
import logging
import operator
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ktk import _core
from ktk.arrays import Array, empty_like, is_tensor, readable, refuse_gradient
from ktk.config import MoEConfig
from ktk.errors import BackendUnsupported
from ktk.given import formats_of, prepared, read_matrix
from ktk.pool import default_pool

if TYPE_CHECKING:
    import numpy as np

    from ktk.backend import Backend

_log = logging.getLogger(__name__)

#: A format for gate, up and down, or one for each of them.
Formats = _core.Format | tuple[_core.Format | None, _core.Format | None, _core.Format | None]
_MOST_SHARDS = 1024
_CONFIG_FIELDS = {f.name for f in fields(MoEConfig)}
_PARTS = ("gate", "up", "down")
_BESIDE = ("scale", "zero", "bias")
_EXPERT_ARRAYS = {*_PARTS, *(f"{part}_{what}" for part in _PARTS for what in _BESIDE)}


class Ticket:
    """A call that was submitted; see :meth:`MoE.submit`. Dropping it waits for the call."""

    def __init__(self, core: _core.Ticket, out: Array) -> None:
        self._core = core
        self._out = out

    @property
    def done(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        return bool(self._core.done)

    def wait(self) -> Array:
        """Wait for the end of the call and return its output; raise what went wrong in it."""
        self._core.wait()
        return self._out

    result = wait

    def __repr__(self) -> str:
        return f"<ktk.Ticket: {'done' if self.done else 'not done'}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a ktk.Ticket cannot be pickled or copied: its call runs in this process; "
            "pass on what its wait() returns"
        )


class MoE:
    """The experts of one layer, packed for one variant of a backend.

    Parameters
    ----------
    backend : Backend
        From :func:`ktk.load_backend`.
    config : MoEConfig, optional
        Sizes and activation; or give its fields as keywords.
    variant : str, optional
        Name of a variant; by default the best one that runs here.
    force : bool
        Take `variant` even where CPUID does not show its instructions (emulators).
    pool : WorkerPool, optional
        By default the pool of the process, :func:`ktk.default_pool`.
    shards : int, optional
        Parts of the intermediate size that weights are divided into, of about the same width; by
        default one per NUMA node that has workers, or as many as 32 columns, or whole blocks of
        ggml's types, allow. Results depend on it in the last bits.
    weight_format : Format or tuple of three, optional
        What to store weights as, where the backend offers a choice: all of them, or gate, up and
        down.

    Raises
    ------
    BackendUnsupported
        When the variant cannot run on this CPU.
    ValueError
        For sizes and numbers of shards that make no sense. Whether weights can be cut into so many
        shards is known, and said, when the first expert is loaded.
    """

    def __init__(
        self,
        backend: Backend,
        config: MoEConfig | None = None,
        *,
        variant: str | None = None,
        force: bool = False,
        pool: _core.WorkerPool | None = None,
        shards: int | None = None,
        weight_format: Formats | None = None,
        **sizes: Any,
    ) -> None:
        unknown = sizes.keys() - _CONFIG_FIELDS
        if unknown:
            raise TypeError(f"MoE got an unexpected keyword argument {min(unknown)!r}")
        if config is not None and sizes:
            raise TypeError("give either config or its fields, not both")
        if not isinstance(getattr(backend, "core", None), _core.Backend):
            raise TypeError(f"backend must be a Backend of ktk.load_backend, got {backend!r}")
        if pool is not None and not isinstance(pool, _core.WorkerPool):
            raise TypeError(f"pool must be a ktk.WorkerPool or None, got {pool!r}")
        if config is not None and not isinstance(config, MoEConfig):
            raise TypeError(f"config must be a ktk.MoEConfig or None, got {config!r}")
        if variant is not None and not isinstance(variant, str):
            raise TypeError(f"variant must be the name of a variant or None, got {variant!r}")
        if shards is not None and _integer("shards", shards) < 1:
            raise ValueError(f"shards must be at least 1, got {shards}")
        if shards is not None and shards > _MOST_SHARDS:
            raise ValueError(f"shards must be at most {_MOST_SHARDS}, got {shards}")
        self.backend = backend
        self.config = config or MoEConfig(**sizes)
        try:
            self._core = _core.MoE(
                backend.core,
                pool or default_pool(),
                num_experts=self.config.num_experts,
                num_experts_per_tok=self.config.num_experts_per_tok,
                hidden_size=self.config.hidden_size,
                intermediate_size=self.config.intermediate_size,
                activation=self.config.activation,
                alpha=self.config.activation_alpha,
                limit=self.config.activation_limit,
                clamp_gate_below=self.config.clamp_gate_below,
                variant=variant or "",
                force=bool(force),
                shards=shards or 0,
                stored=weight_format,
            )
        except RuntimeError as error:
            raise BackendUnsupported(str(error)) from error
        # One for each node, unless that turns out to be too many for the first expert.
        self._hoped_shards = self.shards if shards is None else None

    @classmethod
    def from_checkpoint(
        cls,
        path: str | Path,
        layer: int,
        backend: str | Backend | None = None,
        *,
        shards: int | None = None,
        **options: Any,
    ) -> MoE:
        """Load the experts of one layer of a checkpoint.

        Parameters
        ----------
        path : path
            Directory with ``config.json`` and safetensors files; or a GGUF file, any file of a
            split one, or a directory that holds one model in GGUF files.
        layer : int
            Number of the layer.
        backend : str or Backend, optional
            What computes it. By default the format of the weights decides: see
            :func:`ktk.loading.default_backend`.
        shards : int, optional
            As of :class:`MoE`: by default one per NUMA node.
        **options
            ``experts``: the slots to load, by default all; the others take no memory.
            ``physical_to_logical_map``: as of :meth:`load`. And the keywords of :class:`MoE`;
            ``force=True`` also loads what seems to be more than memory can hold.

        Raises
        ------
        CheckpointError
            When a file is missing, truncated or does not fit; the message names it.
        CheckpointTooLarge
            Memory, or the cgroup's limit, cannot hold the layer; the message says what would fit.

        Notes
        -----
        Weights are always packed anew, ggml's blocks too, and never computed with where a file has
        them: kernels want many rows of a matrix side by side. For the common types packing goes
        through some 2-4 GB of file per second and core, beside reading (IQ1 to IQ3: below 1). So
        there is no ``repack`` option.
        """
        from ktk.loading import load_moe

        if shards is not None:
            options["shards"] = shards
        return load_moe(path, layer, backend, **options)

    def load(
        self,
        gate: Array | Sequence[Array | None],
        up: Array | Sequence[Array | None],
        down: Array | Sequence[Array | None],
        *,
        physical_to_logical_map: Sequence[int] | Array | None = None,
        given: Formats | None = None,
        **arrays: Array | Sequence[Array | None] | None,
    ) -> MoE:
        """Pack all experts; the arrays may go afterwards.

        Parameters
        ----------
        gate, up : array [experts, intermediate_size, hidden_size]
            Or sequences of 2-D arrays, or what :func:`ktk.quantize.quantize` returns. None in place
            of an expert leaves it out: it takes no memory, and rows routed to it contribute nothing
            (it lives on a GPU, say). Arrays whose rows are not contiguous are copied, one expert at
            a time.
        down : array [experts, hidden_size, intermediate_size]
            Likewise.
        physical_to_logical_map : sequence of int, optional
            Slot p is filled with expert ``physical_to_logical_map[p]`` of the arrays. By default
            slot p holds expert p.
        given : Format, its name, or tuple of three, optional
            What the arrays hold, where their dtypes do not tell: all, or gate, up and down.
        **arrays
            ``gate_scale``, ``gate_zero``, ``gate_bias`` and the same for up and down, with a
            leading dimension of experts; as in :meth:`load_expert`.

        Returns
        -------
        MoE
            self.

        Raises
        ------
        RuntimeError, TypeError, ValueError
            As :meth:`load_expert`; or the arrays hold unequal numbers of experts.
        """
        unknown = arrays.keys() - _EXPERT_ARRAYS
        if unknown:
            raise TypeError(f"load() got an unexpected keyword argument {min(unknown)!r}")
        stacks = {"gate": gate, "up": up, "down": down}
        stacks |= {name: stack for name, stack in arrays.items() if stack is not None}
        for name, stack in stacks.items():
            if not hasattr(stack, "__len__"):
                raise TypeError(f"{name} must have an entry for each expert, got {stack!r}")
        count = len(gate)
        for name, stack in stacks.items():
            if len(stack) != count:
                raise ValueError(f"{name} has {len(stack)} experts, gate has {count}")
        slots = self.config.num_experts
        order = range(slots) if physical_to_logical_map is None else physical_to_logical_map
        if not hasattr(order, "__len__"):
            raise TypeError(f"physical_to_logical_map must be a sequence of ints, got {order!r}")
        if len(order) != slots:
            raise ValueError(f"physical_to_logical_map has {len(order)} entries, expected {slots}")
        if physical_to_logical_map is None and count != slots:
            raise ValueError(f"gate has {count} experts, expected {slots}")
        for slot, expert in enumerate(order):
            expert = int(expert)
            if not 0 <= expert < count:
                raise ValueError(f"physical_to_logical_map names expert {expert} of {count}")
            if gate[expert] is None:
                self.leave_out(slot)
            else:
                one = {name: stack[expert] for name, stack in stacks.items()}
                self.load_expert(slot, **one, given=given)
        return self

    def load_expert(
        self,
        expert: int,
        gate: Array,
        up: Array,
        down: Array,
        *,
        given: Formats | None = None,
        **arrays: Array | None,
    ) -> None:
        """Pack one expert; the arrays may go afterwards.

        Parameters
        ----------
        expert : int
            Slot to fill.
        gate, up : array [intermediate_size, hidden_size]
        down : array [hidden_size, intermediate_size]
            f32, f16 or bf16, or what else the backend accepts; or what
            :func:`ktk.quantize.quantize` returns, which brings its scale, zero and format. 8-bit
            floats are torch.float8_e4m3fn or float8_e5m2; two 4-bit elements share a uint8, or are
            torch.float4_e2m1fn_x2; ggml's types are uint8 [rows, bytes of a row].
        given : Format, its name, or tuple of three, optional
            What the arrays hold, where their dtypes do not tell: everything in bytes. One for all,
            or one for each of gate, up and down; a None among them stands for what the dtype says.
        **arrays
            ``gate_scale`` and ``gate_zero`` [groups of n, groups of k] (or [n]: one per row),
            ``gate_bias`` [n], and the same for up and down. Their shapes tell how large groups are,
            among those that the backend takes. torch.float8_e8m0fnu and uint8 hold powers of two.
            ggml's blocks have their scales within; a ``gate_scale`` of one f32 beside them
            multiplies the whole matrix.

        Raises
        ------
        RuntimeError
            A tensor requires grad while torch records gradients.
        TypeError
            An array has a dtype that ktk does not read.
        ValueError
            The backend does not take what is given, or an array has another shape than the sizes of
            the layer mean.
        """
        unknown = arrays.keys() - _EXPERT_ARRAYS
        if unknown:
            raise TypeError(f"load_expert() got an unexpected keyword argument {min(unknown)!r}")
        said = formats_of(given)
        accepts = self.backend.accepts
        read: dict[str, Any] = {}
        formats: list[_core.Format | None] = []
        for part, data, fmt in zip(_PARTS, (gate, up, down), said, strict=True):
            scale, zero, bias = (arrays.get(f"{part}_{what}") for what in _BESIDE)
            one = read_matrix(part, data, scale, zero, fmt, self.backend.name, accepts)
            read |= {part: one.data, f"{part}_scale": one.scale, f"{part}_zero": one.zero}
            read[f"{part}_bias"] = prepared(f"{part}_bias", bias)
            formats.append(one.format)
        self._core.load_expert(
            self._slot(expert), **read, given=(formats[0], formats[1], formats[2])
        )
        if self._hoped_shards is not None:
            _tell_shards(self.config.intermediate_size, self._hoped_shards, self.shards)
            self._hoped_shards = None

    def leave_out(self, expert: int) -> None:
        """Give an expert's memory back; rows routed to it contribute nothing."""
        self._core.leave_out(self._slot(expert))

    def __call__(
        self,
        hidden: Array,
        topk_ids: Array,
        topk_weights: Array,
        *,
        mask: Array | None = None,
        out: Array | None = None,
    ) -> Array:
        """Compute the weighted sum of the chosen experts for each token.

        Parameters
        ----------
        hidden : array [tokens, hidden_size]
            bf16, f16 or f32, in CPU memory. Rows may be strided.
        topk_ids : array [tokens, num_experts_per_tok]
            int32 or int64. Ids < 0 or >= num_experts contribute nothing; an id that a token names
            twice counts twice.
        topk_weights : array [tokens, num_experts_per_tok]
            f32, bf16 or f16.
        mask : array [num_experts], bool, optional
            True: the expert contributes nothing (someone else computes it).
        out : array [tokens, hidden_size], optional
            Where to write; may be `hidden` itself.

        Returns
        -------
        array [tokens, hidden_size]
            `out`, or a new array of the library and dtype of `hidden`.

        Raises
        ------
        RuntimeError
            A tensor requires grad while torch records gradients: nothing here has a backward.
        """
        result = empty_like(hidden) if out is None else out
        # Unbound: torch.compile, which lets this run as it is, would lose what it is bound to.
        _core.MoE.forward(
            self._core, *_inputs(hidden, topk_ids, topk_weights, mask), readable("out", result)
        )
        return result

    def submit(
        self,
        hidden: Array,
        topk_ids: Array,
        topk_weights: Array,
        *,
        mask: Array | None = None,
        out: Array | None = None,
    ) -> Ticket:
        """Queue a call and return at once.

        The inputs are copied and may be changed when this returns. Calls that are submitted to
        layers on one pool run in the order of their submission. Parameters as in a call.
        """
        result = empty_like(hidden) if out is None else out
        if is_tensor(result):
            refuse_gradient("out", result)
        # The core ticket keeps `result` itself, so that its memory outlives the call.
        inputs = _inputs(hidden, topk_ids, topk_weights, mask)
        core = _core.MoE.submit(self._core, *inputs, result)
        return Ticket(core, result)

    def unpack_expert(self, expert: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return gate, up and down of an expert as they are stored, in f32."""
        gate, up, down = self._core.unpack_expert(self._slot(expert))
        return gate, up, down

    @property
    def variant(self) -> str:
        """Name of the variant that computes."""
        return str(self._core.variant)

    @property
    def pool(self) -> _core.WorkerPool:
        """The workers that compute."""
        return self._core.pool

    @property
    def shards(self) -> int:
        """Parts that the weights are divided into; at most, before an expert is loaded."""
        return int(self._core.shards)

    @property
    def shard_widths(self) -> tuple[int, ...]:
        """Intermediate columns of each shard; none before an expert is loaded."""
        return tuple(sum(slices) for slices in self._core.slices)

    @property
    def format(self) -> _core.Format | None:
        """What gate is stored as, and mostly up and down; None before an expert is loaded."""
        return self._core.format

    @property
    def up_format(self) -> _core.Format | None:
        """What up is stored as; None before an expert is loaded."""
        return self._core.up_format

    @property
    def down_format(self) -> _core.Format | None:
        """What down is stored as; None before an expert is loaded."""
        return self._core.down_format

    @property
    def nbytes(self) -> int:
        """Packed bytes of the experts that are loaded."""
        return int(self._core.nbytes)

    @property
    def expert_nbytes(self) -> int:
        """Packed bytes of one expert; 0 before one is loaded."""
        return int(self._core.expert_nbytes)

    def _slot(self, expert: int) -> int:
        slot, slots = _integer("expert", expert), self.config.num_experts
        if not 0 <= slot < slots:
            raise IndexError(f"expert {slot} is not one of {slots}")
        return slot

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a ktk.MoE cannot be pickled or copied: its weights lie packed in the memory of this "
            "process; load another one from the same checkpoint or arrays"
        )

    def __repr__(self) -> str:
        c = self.config
        loaded = self.nbytes // max(self.expert_nbytes, 1)
        of = "" if loaded == c.num_experts else f"{loaded} loaded of "
        return (
            f"<ktk.MoE {self.backend.name}/{self.variant}: {of}{c.num_experts} experts, "
            f"top-{c.num_experts_per_tok}, {c.hidden_size} x {c.intermediate_size}, "
            f"{self.nbytes / 2**20:.0f} MiB>"
        )


def _integer(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an int, got {value!r}") from None


# torch.compile must run calls rather than trace them: what it traces with has no values.
MoE.__call__._torchdynamo_disable = True  # type: ignore[attr-defined]
MoE.submit._torchdynamo_disable = True  # type: ignore[attr-defined]


def _inputs(
    hidden: Array, topk_ids: Array, topk_weights: Array, mask: Array | None
) -> tuple[Array, Array, Array, Array]:
    """Return the inputs of a call as the core reads them."""
    return (
        readable("hidden", hidden),
        readable("topk_ids", topk_ids),
        readable("topk_weights", topk_weights),
        readable("mask", mask),
    )


@functools.cache  # layers of a model are alike
def _tell_shards(intermediate_size: int, nodes: int, shards: int) -> None:
    if shards < nodes:
        _log.info(
            "weights of intermediate size %d are divided into %d shards, not one for each of %d "
            "NUMA nodes: they cannot be cut finer",
            intermediate_size,
            shards,
            nodes,
        )
