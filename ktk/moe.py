"""A layer of experts on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ktk import _core
from ktk.arrays import Array, check_writable, empty_like, readable, writable
from ktk.config import MoEConfig
from ktk.cost.layer import PredictedLayer
from ktk.errors import BackendUnsupported
from ktk.expert import Expert
from ktk.formats import formats_of_parts
from ktk.given import GivenFormats, check_gate, expert_of, experts_of_slots, read_matrix
from ktk.layer import check_shards, inputs, tell_shards
from ktk.lora import Adapters, given_adapters
from ktk.order import with_sorted_rows
from ktk.pool import default_pool
from ktk.protocols import BackendLike
from ktk.ticket import Ticket
from ktk.training import TrainableLayer
from ktk.unread import Unread, UnreadExpert

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_Named = _core.Format | str | None
#: A format for gate, up and down, or one for each of them; or their names.
Formats = _core.Format | str | tuple[_Named, _Named, _Named]
#: An array with a leading dimension of experts, or one array for each expert.
Stack = Array | Sequence[Array | None]


class MoE(TrainableLayer, PredictedLayer):
    """The experts of one layer, packed for one variant of a backend.

    Parameters
    ----------
    backend : Backend
        From :func:`ktk.load_backend`.
    config : MoEConfig
        Sizes and activation function. :meth:`Backend.moe` takes the fields one by one.
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
    weight_format : Format, its name, or tuple of three, optional
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
        backend: BackendLike,
        config: MoEConfig,
        *,
        variant: str | None = None,
        force: bool = False,
        pool: _core.WorkerPool | None = None,
        shards: int | None = None,
        weight_format: Formats | None = None,
    ) -> None:
        if not isinstance(getattr(backend, "core", None), _core.Backend):
            raise TypeError(f"backend must be a Backend of ktk.load_backend, got {backend!r}")
        if pool is not None and not isinstance(pool, _core.WorkerPool):
            raise TypeError(f"pool must be a ktk.WorkerPool or None, got {pool!r}")
        if not isinstance(config, MoEConfig):
            raise TypeError(f"config must be a ktk.MoEConfig, got {config!r}")
        if variant is not None and not isinstance(variant, str):
            raise TypeError(f"variant must be the name of a variant or None, got {variant!r}")
        check_shards(shards)
        stored = formats_of_parts("weight_format", weight_format)
        self.backend = backend
        self.config = config
        workers = pool or default_pool()
        try:
            self._core = _core.MoE(
                backend.core,
                workers,
                config,
                variant=variant or "",
                force=bool(force),
                shards=shards or 0,
                stored=stored,
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
        backend: str | BackendLike | None = None,
        *,
        experts: Sequence[int] | None = None,
        physical_to_logical_map: Sequence[int] | None = None,
        module: str | None = None,
        activation: str | None = None,
        top_k: int | None = None,
        config: MoEConfig | None = None,
        variant: str | None = None,
        force: bool = False,
        pool: _core.WorkerPool | None = None,
        shards: int | None = None,
        weight_format: Formats | None = None,
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
        experts : sequence of int, optional
            The slots to load, by default all; the others take no memory and contribute nothing.
        physical_to_logical_map : sequence of int, optional
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
        config : MoEConfig, optional
            What the layer is, where it is to be other than the checkpoint says: an activation
            function that ktk knows instead of one that it does not. Sizes are the checkpoint's;
            with a map there may be more slots than experts (redundant copies).
        force : bool
            Also load what seems to be more than memory can hold; and as of :class:`MoE`.
        variant, pool, shards, weight_format
            As of :class:`MoE`.

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

        return load_moe(
            path,
            layer,
            cast("Any", backend),  # a Backend, which is above this module
            experts=experts,
            physical_to_logical_map=physical_to_logical_map,
            module=module,
            activation=activation,
            top_k=top_k,
            config=config,
            variant=variant,
            force=force,
            pool=pool,
            shards=shards,
            weight_format=weight_format,
        )

    def load(
        self,
        gate: Stack | None,
        up: Stack,
        down: Stack,
        *,
        gate_scale: Stack | None = None,
        up_scale: Stack | None = None,
        down_scale: Stack | None = None,
        gate_zero: Stack | None = None,
        up_zero: Stack | None = None,
        down_zero: Stack | None = None,
        gate_bias: Stack | None = None,
        up_bias: Stack | None = None,
        down_bias: Stack | None = None,
        gate_factor: Stack | None = None,
        up_factor: Stack | None = None,
        down_factor: Stack | None = None,
        physical_to_logical_map: Sequence[int] | Array | None = None,
        given: GivenFormats | None = None,
    ) -> MoE:
        """Pack all experts; the arrays may go afterwards.

        Parameters
        ----------
        gate, up : array [experts, intermediate_size, hidden_size]
            Or sequences of 2-D arrays, or what :func:`ktk.quantize.quantize` returns. None in place
            of an expert leaves it out: it takes no memory, and rows routed to it contribute nothing
            (it lives on a GPU, say). Arrays whose rows are not contiguous are copied, one expert at
            a time. None for all of gate where experts have none.
        down : array [experts, hidden_size, intermediate_size]
            Likewise.
        gate_scale, up_scale, down_scale, gate_zero, up_zero, down_zero : array, optional
            Scales and zero points as in :meth:`load_expert`, with a leading dimension of experts.
        gate_bias, up_bias : array [experts, intermediate_size], optional
        down_bias : array [experts, hidden_size], optional
        gate_factor, up_factor, down_factor : array [experts, 1], optional
        physical_to_logical_map : sequence of int, optional
            Slot p is filled with expert ``physical_to_logical_map[p]`` of the arrays. By default
            slot p holds expert p.
        given : Format, its name, or tuple of three, optional
            What the arrays hold, where their dtypes do not tell: all, or gate, up and down.

        Returns
        -------
        MoE
            self.

        Raises
        ------
        RuntimeError, TypeError, ValueError
            As :meth:`load_expert`; or the arrays hold unequal numbers of experts.
        """
        check_gate(self.config.gated, gate is not None)
        stacks: dict[str, Any] = {"up": up, "down": down}
        if gate is not None:
            stacks = {"gate": gate} | stacks
        beside = {
            "gate_scale": gate_scale,
            "up_scale": up_scale,
            "down_scale": down_scale,
            "gate_zero": gate_zero,
            "up_zero": up_zero,
            "down_zero": down_zero,
            "gate_bias": gate_bias,
            "up_bias": up_bias,
            "down_bias": down_bias,
            "gate_factor": gate_factor,
            "up_factor": up_factor,
            "down_factor": down_factor,
        }
        stacks |= {name: stack for name, stack in beside.items() if stack is not None}
        sources = experts_of_slots(stacks, self.config.num_experts, physical_to_logical_map)
        for slot, expert in enumerate(sources):
            if up[expert] is None:
                self.leave_out(slot)
            else:
                one = {name: stack[expert] for name, stack in stacks.items()}
                self.load_expert(slot, **one, given=given)
        return self

    def load_expert(
        self,
        expert: int,
        gate: Array | Expert | None = None,
        up: Array | None = None,
        down: Array | None = None,
        *,
        gate_scale: Array | None = None,
        up_scale: Array | None = None,
        down_scale: Array | None = None,
        gate_zero: Array | None = None,
        up_zero: Array | None = None,
        down_zero: Array | None = None,
        gate_bias: Array | None = None,
        up_bias: Array | None = None,
        down_bias: Array | None = None,
        gate_factor: Array | None = None,
        up_factor: Array | None = None,
        down_factor: Array | None = None,
        given: GivenFormats | None = None,
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
            torch.float4_e2m1fn_x2; ggml's types are uint8 [rows, bytes of a row]. An
            :class:`ktk.expert.Expert` in the place of gate, such as readers of checkpoints give,
            stands for all arguments that follow. None for gate where experts have none.
        gate_scale, up_scale, down_scale : array [groups of n, groups of k], optional
            Or [n]: one per row. The shape tells how large groups are, among those that the backend
            takes. torch.float8_e8m0fnu and uint8 hold powers of two; float8_e4m3fn, or uint8, the
            scales of NVFP4. ggml's blocks have their scales within; one f32 beside them multiplies
            the whole matrix.
        gate_zero, up_zero, down_zero : array, optional
            Zero points, of the shapes of the scales.
        gate_bias, up_bias : array [intermediate_size], optional
        down_bias : array [hidden_size], optional
        gate_factor, up_factor, down_factor : array [1], optional
            An f32 that multiplies a whole matrix: ModelOpt's weight_scale_2 of NVFP4, or one over
            the weight_global_scale of compressed-tensors.
        given : Format, its name, or tuple of three, optional
            What the arrays hold, where their dtypes do not tell: everything in bytes. One for all,
            or one for each of gate, up and down; a None among them stands for what the dtype says.

        Raises
        ------
        RuntimeError
            A tensor requires grad while torch records gradients.
        TypeError
            An array has a dtype that ktk does not read, or a matrix is missing, or there is a gate
            and experts of this layer have none.
        ValueError
            The backend does not take what is given, or an array has another shape than the sizes of
            the layer mean; or columns of a matrix are in an order that is none.
        CheckpointError
            What an `UnreadExpert` has in a file cannot be read. What was in the slot may be lost.
        """
        arguments = {
            "gate": (gate, gate_scale, gate_zero, gate_bias, gate_factor),
            "up": (up, up_scale, up_zero, up_bias, up_factor),
            "down": (down, down_scale, down_zero, down_bias, down_factor),
        }
        weights = expert_of(arguments, given, self.config.parts)
        name, accepts = self.backend.name, self.backend.accepts
        matrices = with_sorted_rows(weights).matrices.items()
        ready = Expert(**{part: read_matrix(part, one, name, accepts) for part, one in matrices})
        of_gate = ready.gate.format if ready.gate else None
        formats = (of_gate, ready.up.format, ready.down.format)
        slot, arrays = self._slot(expert), {"gate": None, **ready.arrays()}
        unread = weights.unread if isinstance(weights, UnreadExpert) else Unread()
        with unread.reading() as reads:
            self._core.load_expert(slot, **arrays, given=formats, unread=reads)
        if self._hoped_shards is not None:
            tell_shards(self.config.intermediate_size, self._hoped_shards, self.shards)
            self._hoped_shards = None

    def leave_out(self, expert: int) -> None:
        """Give an expert's memory back; rows routed to it contribute nothing."""
        self._core.leave_out(self._slot(expert))

    def unload_expert(self, expert: int) -> None:
        """Give an expert's memory back; a row that is routed to it must be masked.

        For experts that others compute from now on. A call that wants the expert raises a
        RuntimeError, until `load_expert` brings it back.
        """
        self._core.unload_expert(self._slot(expert))

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """How often tokens chose each expert, int64 [num_experts]; a copy.

        In all calls (with adapters, by streams and graphs, and forward passes of training) since
        the layer was made or `reset_counts` was called. An expert counts once for each token and
        choice, whoever computes it: masked, left out, deferred. Ids that are no experts, or zero
        experts, count nowhere, nor do calls that fail or have not ended. The same for any number
        of workers and shards.
        """
        import numpy as np

        return np.array(self._core.counts, dtype=np.int64)

    def reset_counts(self) -> None:
        """Count from 0 again; waits for a call that runs."""
        self._core.reset_counts()

    def __call__(
        self,
        hidden: Array,
        topk_ids: Array,
        topk_weights: Array,
        *,
        mask: Array | None = None,
        out: Array | None = None,
        lora: Adapters | None = None,
        adapter_ids: Array | None = None,
    ) -> Array:
        """Compute the weighted sum of the chosen experts for each token.

        Parameters
        ----------
        hidden : array [tokens, hidden_size]
            bf16, f16 or f32, in CPU memory. Rows may be strided.
        topk_ids : array [tokens, k]
            int32 or int64; k is mostly, but need not be, the layer's num_experts_per_tok. Ids from
            num_experts on name zero experts, of which a layer has zero_expert_num, mostly none. Ids
            that name nobody contribute nothing; an id that a token names twice counts twice.
        topk_weights : array [tokens, k]
            f32, bf16 or f16.
        mask : array [num_experts], bool, optional
            True: the expert contributes nothing (someone else computes it). Zero experts have no
            place here: whose they are, ids say.
        out : array [tokens, hidden_size], optional
            Where to write; may be `hidden` itself, or overlap it, which takes a copy.
        lora : Lora or sequence of Lora, optional
            An adapter for all tokens, or several.
        adapter_ids : array [tokens], int32 or int64, optional
            Which of several adapters each token has; -1, or any number that is none, for no one.

        Returns
        -------
        array [tokens, hidden_size]
            `out`, or a new array of the library and dtype of `hidden`.

        Raises
        ------
        RuntimeError
            A tensor requires grad while torch records gradients: `forward_train` and `backward`
            are for that.
        """
        result = empty_like(hidden) if out is None else out
        if lora is not None or adapter_ids is not None:
            _core.forward_with(
                self._core,
                *inputs(hidden, topk_ids, topk_weights, mask),
                writable("out", result),
                given_adapters(lora, adapter_ids),
                readable("adapter_ids", adapter_ids),
                None,
            )
            return result
        # Unbound: torch.compile, which lets this run as it is, would lose what it is bound to.
        _core.MoE.forward(
            self._core, *inputs(hidden, topk_ids, topk_weights, mask), writable("out", result)
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
        check_writable("out", result)
        # The call keeps `result`, so that its memory outlives the call.
        call = _core.AsyncCall(self._core, *inputs(hidden, topk_ids, topk_weights, mask), result)
        _core.AsyncCall.start(call)  # unbound, as above
        return Ticket(call, result)


# torch.compile must run calls rather than trace them: what it traces with has no values.
MoE.__call__._torchdynamo_disable = True  # type: ignore[attr-defined]
MoE.submit._torchdynamo_disable = True  # type: ignore[attr-defined]
