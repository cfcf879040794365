"""A layer whose experts are divided over the ranks of a group."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import timedelta
from numbers import Real
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist

from ktk.backend import Backend
from ktk.distributed.call import Tokens, tokens_of
from ktk.distributed.connect import mesh_of
from ktk.distributed.failure import RankFailed
from ktk.distributed.frames import Header
from ktk.distributed.placement import Placement
from ktk.distributed.shared import call_shared
from ktk.distributed.split import call_split
from ktk.distributed.step import Refused, Step, Work
from ktk.moe import MoE

#: Seconds that a rank may be silent where nobody says.
TIMEOUT = 300.0
# What sockets and poll() take is more.
_LONGEST = 1_000_000
#: Tokens of a rank that are sent and computed at once.
CHUNK = 1024


class ExpertParallel:
    """A layer of experts, of which each rank of a group holds some.

    All ranks make one together, and call it together: as often, in the same order as other divided
    layers of the group. Tokens go to the ranks that hold their experts, sums come back.

    Parameters
    ----------
    moe : MoE
        The layer with the experts of this rank loaded, in their places; what others hold is left
        out.
    group : ProcessGroup, optional
        Of `torch.distributed`, of any backend; by default all ranks. Ranks find each other with it;
        tokens travel over connections of their own.
    placement : Placement, optional
        The same on all ranks. By default `Placement.contiguous`.
    shared : bool
        Whether all ranks call with the same tokens, as in tensor parallelism, and all get all of
        the result. By default each has tokens of its own, any number of them.
    chunk : int
        Tokens of a rank that are sent and computed at once.
    timeout : float or timedelta
        How long a rank may be silent, in seconds, before the others give up: a million at most. It
        has to be longer than what any rank does between two calls.

    Raises
    ------
    ValueError
        Ranks disagree on sizes, backend, formats or placement, or lack experts; on all of them.
    TypeError
        An argument of this rank is of a wrong type, as a `moe` that is no `ktk.MoE`; the others
        raise a ValueError that says so.
    ConnectionError
        A rank cannot be reached.

    Notes
    -----
    A rank adds up the experts that it holds as :class:`ktk.MoE` does, in f32; these sums are added
    in f32 in the order of ranks, rank 0 first, and rounded once to the type of `hidden`. So the
    result depends on the placement, and not on batches, chunks or timing. Zero experts are added
    once, by the lowest rank that computes an expert of the token, and where the token is if none
    does.
    """

    def __init__(
        self,
        moe: MoE,
        group: Any = None,
        *,
        placement: Placement | None = None,
        shared: bool = False,
        chunk: int = CHUNK,
        timeout: float | timedelta = TIMEOUT,
    ) -> None:
        group, rank, size = _group(group)
        with _told(group):
            if not isinstance(moe, MoE):
                raise TypeError(f"moe must be a ktk.MoE, got {moe!r}")
            chunk, seconds = _integer(chunk), _seconds(timeout)
            if placement is None:
                placement = Placement.contiguous(moe.config.num_experts, size)
            _check_placement(placement)
            problem = _problem(moe, placement, rank, size, chunk, seconds)
            mine = {
                **asdict(moe.config),
                "backend": moe.backend.name,
                "formats": [str(one) for one in (moe.format, moe.up_format, moe.down_format)],
                "placement": placement.experts,
                "shared": bool(shared),
                "chunk": chunk,
                "timeout": seconds,
            }
        _agree(problem, mine, group)
        mesh = mesh_of(group, seconds)
        self.moe = moe
        self.placement = placement
        self._work = Work(moe, mesh, placement, chunk, seconds, bool(shared))
        self._layer = mesh.new_layer()

    @classmethod
    def from_checkpoint(
        cls,
        path: str | Path,
        layer: int,
        backend: str | Backend | None = None,
        *,
        group: Any = None,
        placement: Placement | None = None,
        shared: bool = False,
        chunk: int = CHUNK,
        timeout: float | timedelta = TIMEOUT,
        **options: Any,
    ) -> ExpertParallel:
        """Load the experts of this rank, and nothing else of the layer.

        Parameters
        ----------
        path, layer, backend
            As of :meth:`ktk.MoE.from_checkpoint`; so are further options.
        group, placement, shared, chunk, timeout
            As of the class.

        Raises
        ------
        Exception
            What :meth:`ktk.MoE.from_checkpoint` raised on this rank.
        ValueError
            A rank could not load its experts, and this sentence says why; also as of the class.
        TypeError, ConnectionError
            As of the class.
        """
        from ktk.checkpoint.open import open_checkpoint

        group, rank, size = _group(group)
        with _told(group):
            if placement is None:
                read = {name: options.get(name) for name in ("module", "activation", "top_k")}
                with open_checkpoint(path, **read) as checkpoint:
                    config = options.get("config") or checkpoint.layer(layer).config
                placement = Placement.contiguous(config.num_experts, size)
            _check_placement(placement)
            if placement.ranks != size:
                raise ValueError(_other_ranks(placement, size))
            experts = placement.experts[rank]
            moe = MoE.from_checkpoint(path, layer, backend, experts=experts, **options)
        return cls(moe, group, placement=placement, shared=shared, chunk=chunk, timeout=timeout)

    def __call__(
        self,
        hidden: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute the weighted sum of the chosen experts for each token of this rank.

        Parameters
        ----------
        hidden : tensor [tokens, hidden_size]
            f32, bf16 or f16, the same on all ranks. `tokens` may differ from rank to rank, and be
            0, unless ranks share their tokens.
        topk_ids : tensor of integers [tokens, k]
            Numbers of experts among all of the layer, of its zero experts, or -1 for none. k is the
            same on all ranks.
        topk_weights : tensor of floats [tokens, k]
        out : tensor [tokens, hidden_size], optional
            Where to write, contiguous and of the type of `hidden`.

        Returns
        -------
        tensor [tokens, hidden_size]
            `out`, or a new tensor like `hidden`.

        Raises
        ------
        TypeError, ValueError
            Arguments of a rank are wrong, or those of ranks do not go together; the same sentence
            on all ranks. The next call may be right.
        RankFailed
            A rank has ended, hangs, or left the call by an error; all later calls raise it, too.
        """
        work = self._work
        work.mesh.check()
        config = self.moe.config
        problem: Exception | None = None
        try:
            tokens = tokens_of(hidden, topk_ids, topk_weights, config.hidden_size, config.num_ids)
            result = _result(out, tokens)
        except (TypeError, ValueError, RuntimeError) as error:
            problem = error
            tokens = Tokens(
                torch.empty(0, config.hidden_size, dtype=torch.float32, device="cpu"),
                np.empty((0, 1), np.int32),
                np.empty((0, 1), np.float32),
            )
            result = tokens.hidden
        header = Header(
            0,
            self._layer,
            tokens=tokens.count,
            k=tokens.k,
            dtype=tokens.dtype,
            width=config.hidden_size,
        )
        step = Step(work, tokens, header, problem)
        try:
            with work.mesh.turn:
                (call_shared if work.shared else call_split)(work, step, result)
        except Refused as refused:
            raise refused.reason from problem
        except RankFailed:
            raise
        except BaseException:
            work.mesh.abort()
            raise
        if out is not None:
            return out
        return result if hidden.device.type == "cpu" else result.to(hidden.device)

    @property
    def rank(self) -> int:
        """Of this process in the group."""
        return self._work.rank

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return self._work.mesh.size

    @property
    def shared(self) -> bool:
        """Whether all ranks call with the same tokens."""
        return self._work.shared

    @property
    def sent_bytes(self) -> int:
        """Bytes that this process has sent to the other ranks, for all layers of the group."""
        return self._work.mesh.sent_bytes

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an ExpertParallel cannot be pickled or copied: it is connected to other processes; "
            "make one in each process"
        )

    def __repr__(self) -> str:
        return f"<ktk.distributed.ExpertParallel rank {self.rank} of {self.size}: {self.moe!r}>"


def _result(out: torch.Tensor | None, tokens: Tokens) -> torch.Tensor:
    if out is None:
        return torch.empty_like(tokens.hidden)
    if out.shape != tokens.hidden.shape or out.dtype != tokens.hidden.dtype:
        raise ValueError(
            f"out must be {list(tokens.hidden.shape)} of {tokens.hidden.dtype}, got "
            f"{list(out.shape)} of {out.dtype}"
        )
    if not out.is_contiguous() or out.device.type != "cpu":
        raise ValueError("out must be contiguous, and in CPU memory")
    return out


def _group(group: Any) -> tuple[Any, int, int]:
    """Return a group, by default that of all ranks, and this process's rank and its size."""
    group = dist.group.WORLD if group is None else group
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    if rank < 0:
        raise ValueError("this process is not in the group")
    return group, rank, size


def _integer(chunk: Any) -> int:
    try:
        return operator.index(chunk)
    except TypeError:
        raise TypeError(f"chunk must be an integer, got {chunk!r}") from None


def _seconds(timeout: Any) -> float:
    if isinstance(timeout, timedelta):
        return timeout.total_seconds()
    if not isinstance(timeout, Real):
        raise TypeError(f"timeout must be seconds or a timedelta, got {timeout!r}")
    return float(timeout)


def _check_placement(placement: Any) -> None:
    if not isinstance(placement, Placement):
        raise TypeError(f"placement must be a Placement, got {placement!r}")


def _other_ranks(placement: Placement, size: int) -> str:
    return f"placement has {placement.ranks} ranks, and the group {size}"


def _problem(
    moe: MoE, placement: Placement, rank: int, size: int, chunk: int, timeout: float
) -> str:
    """Say what is wrong with the arguments of a rank; empty if nothing is."""
    if placement.ranks != size:
        return _other_ranks(placement, size)
    if placement.num_experts != moe.config.num_experts:
        return (
            f"placement is of {placement.num_experts} experts, and the layer has "
            f"{moe.config.num_experts}"
        )
    if missing := sorted(set(placement.experts[rank]) - set(moe.loaded)):
        return f"expert {missing[0]} is this rank's by placement, and is not loaded"
    if chunk < 1:
        return f"chunk must be at least 1, got {chunk}"
    if not 0 < timeout <= _LONGEST:
        return f"timeout must be more than 0 and at most {_LONGEST:,} seconds, got {timeout}"
    return ""


@contextmanager
def _told(group: Any) -> Iterator[None]:
    """Raise an error of this rank, when the others have learned of it where they agree."""
    try:
        yield
    except Exception as error:
        with suppress(RuntimeError):  # of ranks that are gone; what is wrong here says more
            _exchange(f"{type(error).__name__}: {error}", {}, group)
        raise


def _exchange(problem: str, mine: dict[str, Any], group: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return what all ranks say is wrong, if anything, and what they were made with."""
    every: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, (problem, mine), group=group)
    return every


def _agree(problem: str, mine: dict[str, Any], group: Any) -> None:
    """Compare what ranks were made with; raise a ValueError on all of them if that differs."""
    every = _exchange(problem, mine, group)
    for rank, (said, _) in enumerate(every):
        if said:
            raise ValueError(f"rank {rank}: {said}")
    _, first = every[0]
    for rank, (_, other) in enumerate(every):
        for name, value in other.items():
            unknown = name == "formats" and "None" in (*value, *first[name])  # it has no experts
            if value != first[name] and not unknown:
                raise ValueError(
                    f"rank {rank} has {name} {value} and rank 0 has {first[name]}: a divided layer "
                    "has to be the same on all ranks"
                )
