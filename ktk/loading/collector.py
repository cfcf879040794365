"""Packs experts from tensors that somebody else reads, in whatever order they come."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, cast

import torch

from ktk._core import WorkerPool
from ktk.backend import Backend
from ktk.checkpoint.entries import EntryError
from ktk.checkpoint.quantization import read_quantization
from ktk.checkpoint.safetensors.families import Stored
from ktk.checkpoint.safetensors.scheme import StorageError
from ktk.checkpoint.safetensors.split import split_tensor
from ktk.checkpoint.safetensors.storage import SCHEMES
from ktk.checkpoint.safetensors.tensors import has_roles, read_part
from ktk.checkpoint.spans import spans
from ktk.config import MoEConfig
from ktk.errors import BackendError, CheckpointError, CheckpointFormatError
from ktk.expert import Expert, Matrix
from ktk.layer import integer
from ktk.loading.cut import columns_of, cut_expert
from ktk.loading.default import candidates
from ktk.loading.route import chooser, fitted, format_named_by
from ktk.moe import Formats, MoE
from ktk.registry import load_backend

_JOINED = "gate_up"
_BIAS = "bias"


class ExpertCollector:
    """Packs the experts of a layer as their tensors come, so that few raw experts ever exist.

    For hosts that read checkpoints themselves and hand over one tensor at a time. An expert is
    packed when its last tensor is there, and its tensors are let go.

    ::

        collector = ktk.ExpertCollector(config, roles=["weight", "weight_scale_inv"],
                                        quantization=hf_config.quantization_config)
        for expert, part, role, tensor in stream:
            collector.take(expert, part, role, tensor)
        moe = collector.finish()

    When `finish` has returned the layer, tensors may come again, as they do where a host follows a
    model that learns: an expert replaces the packed one when all of its tensors are there.

    Parameters
    ----------
    layer : MoEConfig or MoE
        What the layer is: it is made when the first expert is whole. Or a layer that is there, and
        is filled.
    roles : sequence of str
        The tensors of each matrix, by what follows its name in a checkpoint: ``weight`` of floats;
        ``weight`` and ``weight_scale_inv``; ``weight_packed``, ``weight_scale`` and
        ``weight_shape``; ``qweight``, ``scales``, ``qzeros``; ``blocks`` and ``scales``.
    quantization : mapping, optional
        The quantization_config of the checkpoint's config.json, where weights are codes.
    backend : str or Backend, optional
        What computes the layer. By default the format of the weights decides.
    bias : bool
        Whether each matrix also has a tensor ``bias``.
    interleaved : bool
        Whether rows of gate and up alternate in a part ``gate_up``; by default all rows of gate
        come before all of up.
    transposed : bool
        Whether weights of floats come as [columns, rows].
    rank, ranks : int
        Which part of every expert to keep, of how many: rows of gate and up, columns of down. The
        results of all ranks add up to that of the layer.
    pool, shards, weight_format
        As of :class:`ktk.MoE`.
    name : str
        Of the layer, for messages.

    Attributes
    ----------
    moe : MoE or None
        The layer; None before the first expert is whole.
    packed : int
        Experts that are packed.

    Raises
    ------
    BackendError
        The backend cannot be used.
    ValueError
        No scheme that ktk knows has these roles; or ranks that make no sense.
    """

    def __init__(
        self,
        layer: MoEConfig | MoE,
        roles: Sequence[str] = ("weight",),
        *,
        quantization: Mapping[str, Any] | None = None,
        backend: str | Backend | None = None,
        bias: bool = False,
        interleaved: bool = False,
        transposed: bool = False,
        rank: int = 0,
        ranks: int = 1,
        pool: WorkerPool | None = None,
        shards: int | None = None,
        weight_format: Formats | None = None,
        name: str = "",
    ) -> None:
        self.moe = layer if isinstance(layer, MoE) else None
        self.config = layer.config if isinstance(layer, MoE) else layer
        if not isinstance(self.config, MoEConfig):
            raise TypeError(f"layer must be a ktk.MoEConfig or a ktk.MoE, got {layer!r}")
        self.roles = tuple(roles)
        if not any(has_roles(scheme, self.roles) for scheme in SCHEMES):
            raise ValueError(
                f"no way of storing a matrix that ktk knows has the tensors "
                f"{', '.join(map(repr, self.roles)) or 'none'}"
            )
        if not 0 <= integer("rank", rank) < integer("ranks", ranks):
            raise ValueError(f"rank must be from 0 to {ranks - 1}, got {rank}")
        if self.moe is not None and (ranks > 1 or backend is not None):
            raise ValueError("a layer that is there has its backend and sizes: give a MoEConfig")
        try:
            self._quantization = read_quantization({"quantization_config": quantization})
        except EntryError as error:
            raise ValueError(str(error)) from error
        self._backend = load_backend(backend) if isinstance(backend, str) else backend
        self._named = format_named_by(backend)
        self._each = (*self.roles, *((_BIAS,) if bias else ()))
        both = "I2" if interleaved else "2I"
        self._rows = {"gate": "I", "up": "I", "down": "H", _JOINED: both}
        self._transposed = transposed
        self._rank, self._ranks = rank, ranks
        self._columns: tuple[int, int] | None = None
        self._options: dict[str, Any] = {
            "pool": pool,
            "shards": shards,
            "weight_format": weight_format,
        }
        self._name = f"{name}: " if name else ""
        self._held: dict[int, dict[tuple[str, str], torch.Tensor]] = {}
        self._done: set[int] = set()
        self._finished = False
        self._lock = threading.Lock()

    def take(self, expert: int, part: str, role: str, tensor: torch.Tensor) -> bool:
        """Take one tensor of one expert.

        Parameters
        ----------
        expert : int
            Which one it is.
        part : str
            gate, up or down; or gate_up, for both in one tensor.
        role : str
            One of `roles`, or bias.
        tensor : torch.Tensor
            As the checkpoint has it; on another device it is copied. It must not change before its
            expert is packed.

        Returns
        -------
        bool
            Whether the expert was whole with it, and is packed.

        Raises
        ------
        CheckpointError
            The expert is whole, and what its tensors hold cannot be read; the message names the
            tensor that is wrong.
        IndexError
            The layer has no such expert.
        TypeError, ValueError
            There is no such part or role; or the tensor came before. (Where an expert comes again,
            it begins anew with a tensor that came before.)
        """
        slot, count = integer("expert", expert), self.config.num_experts
        if not 0 <= slot < count:
            raise IndexError(f"{self._name}expert {slot} is not one of {count}")
        if part not in self._rows:
            raise ValueError(f"part must be one of {', '.join(self._rows)}, got {part!r}")
        where = f"{self._name}{part} of expert {slot}"
        if role not in self._each:
            raise ValueError(
                f"{where} has a tensor {role!r}, and those announced are {', '.join(self._each)}"
            )
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{where}: {role} must be a tensor of torch, got {tensor!r}")
        with self._lock:
            if slot in self._done and not self._finished:
                raise ValueError(f"{where}: {role} came after the expert was packed")
            held = self._held.setdefault(slot, {})
            if (part, role) in held:
                if not self._finished:
                    raise ValueError(f"{where}: {role} came twice")
                # What a host began and gave up is no part of what comes now.
                held.clear()
            if other := self._contradiction(part, held):
                raise ValueError(f"{where} came beside {other}, which holds the same rows")
            held[part, role] = tensor.detach()
            if self._missing(held):
                return False
            self._pack(slot, self._held.pop(slot))
            return True

    def finish(self) -> MoE:
        """Return the layer, when all experts are packed, and those that began to come again are.

        Raises
        ------
        CheckpointError
            Experts, or tensors of experts, did not come; the message names them.
        """
        with self._lock:
            for slot, held in sorted(self._held.items()):
                lacking = [f"{part} {role}" for part, role in self._missing(held)]
                raise CheckpointError(
                    f"{self._name}expert {slot} is not whole: {', '.join(lacking)} did not come"
                )
            lost = sorted(set(range(self.config.num_experts)) - self._done)
            if lost or self.moe is None:
                more = "expert" if len(lost) == 1 else "experts"
                raise CheckpointError(f"{self._name}nothing came of {more} {spans(lost)}")
            self._finished = True
            return self.moe

    @property
    def packed(self) -> int:
        """Experts that are packed."""
        return len(self._done)

    @property
    def held_nbytes(self) -> int:
        """Bytes of the tensors that wait for the rest of their experts."""
        with self._lock:
            return sum(t.nbytes for held in self._held.values() for t in held.values())

    def _missing(self, held: Mapping[tuple[str, str], Any]) -> list[tuple[str, str]]:
        joined = any(part == _JOINED for part, _ in held)
        parts = (_JOINED, "down") if joined else self.config.parts
        each = [(part, role) for part in parts for role in self._each]
        return [one for one in each if one not in held]

    def _contradiction(self, part: str, held: Mapping[tuple[str, str], Any]) -> str:
        others = {"gate": (_JOINED,), "up": (_JOINED,), _JOINED: ("gate", "up"), "down": ()}
        return next((other for other, _ in held if other in others[part]), "")

    def _pack(self, slot: int, held: Mapping[tuple[str, str], torch.Tensor]) -> None:
        matrices: dict[str, Matrix] = {}
        for part in dict.fromkeys(part for part, _ in held):
            tensors = {role: held[part, role].cpu() for role in self._each}
            matrices |= self._read(slot, part, tensors)
        expert = Expert(**{part: matrices[part] for part in self.config.parts})
        if self._ranks > 1:
            if self._columns is None:
                size = self.config.intermediate_size
                self._columns = columns_of(expert, size, self._rank, self._ranks)
            expert = cut_expert(expert, *self._columns, self._rank)
        if self.moe is None:
            self.moe = self._make(expert)
        backend = cast("Backend", self.moe.backend)
        choose = chooser(backend, self._options["weight_format"], self._named)
        ready = {}
        for part, matrix in expert.matrices.items():
            try:
                ready[part] = fitted(part, matrix, backend, choose)
            except ValueError as error:
                raise CheckpointError(f"{self._name}{part} of expert {slot}: {error}") from error
            except CheckpointFormatError as error:
                raise CheckpointFormatError(
                    f"{self._name}{part} of expert {slot} {error}"
                ) from error
        self.moe.load_expert(slot, Expert(**ready))
        self._done.add(slot)

    def _read(self, slot: int, part: str, tensors: dict[str, torch.Tensor]) -> dict[str, Matrix]:
        hidden, inner = self.config.hidden_size, self.config.intermediate_size
        n, k = {"down": (hidden, inner), _JOINED: (2 * inner, hidden)}.get(part, (inner, hidden))
        axes = [self._rows[part], "I" if part == "down" else "H"]
        stored = Stored(part, " ".join(reversed(axes) if self._transposed else axes))
        bias = tensors.pop(_BIAS, None)
        where = f"{self._name}{part} of expert {slot}"
        try:
            found = read_part(part, tensors, stored, n, k, self._quantization)
        except StorageError as error:
            raise CheckpointError(f"{where} {error}") from None
        if bias is not None:
            if bias.shape != (n,) or not bias.is_floating_point():
                raise CheckpointError(
                    f"{where} has a tensor bias of type {bias.dtype} and shape "
                    f"{list(bias.shape)}, expected floats [{n}]"
                )
            split = split_tensor(f"{part}_bias", bias, axes[:1])
            found = {name: replace(one, bias=split[f"{name}_bias"]) for name, one in found.items()}
        return found

    def _make(self, expert: Expert) -> MoE:
        """Make the layer, for the backend that was named or the first that takes an expert."""
        first, behind = self._columns or (0, self.config.intermediate_size)
        config = replace(self.config, intermediate_size=behind - first)
        backend = self._backend or self._default(expert)
        return backend.moe(**asdict(config), **self._options)

    def _default(self, expert: Expert) -> Backend:
        formats = [matrix.format for matrix in expert.matrices.values() if matrix.format]
        reasons = []
        for name, exactly in candidates({fmt.element for fmt in formats}):
            try:
                backend = load_backend(name)
                for part, matrix in expert.matrices.items():
                    ready = fitted(part, matrix, backend, chooser(backend))
                    if exactly and ready.data is not matrix.data:
                        raise CheckpointFormatError("takes it only after decoding")
                return backend
            except (BackendError, CheckpointFormatError) as error:
                reasons.append(f"{name}: {error}")
        raise CheckpointFormatError(
            f"{self._name}experts are stored as {', '.join(dict.fromkeys(map(str, formats)))}, and "
            f"no backend takes that: {'; '.join(reasons)}"
        )
