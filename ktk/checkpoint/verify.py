"""Reads all experts of a checkpoint and says what is wrong with them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ktk.checkpoint.open import open_checkpoint
from ktk.checkpoint.reader import LayerReader
from ktk.errors import CheckpointError

#: Called after each expert with the number of its layer, its bytes, and the bytes of all layers.
OnExpert = Callable[[int, int, int], None]


@dataclass(frozen=True)
class Fault:
    """Something that is wrong.

    Attributes
    ----------
    message
        One sentence, with file and tensor where these are to blame.
    layer, expert
        Their numbers; None where the fault is not of one.
    tensor, file
        Its name as the file has it, and the file; None where the message alone names them.
    """

    message: str
    layer: int | None = None
    expert: int | None = None
    tensor: str | None = None
    file: str | None = None


@dataclass
class Verification:
    """What `verify` found.

    Attributes
    ----------
    path
        The checkpoint.
    layers
        Numbers of the layers that were looked at.
    experts, nbytes
        How many experts of them were read, and their bytes in the files.
    faults
        The first ones that were found.
    more
        How many were found beside these.
    """

    path: Path
    layers: tuple[int, ...] = ()
    experts: int = 0
    nbytes: int = 0
    faults: list[Fault] = field(default_factory=list)
    more: int = 0

    @property
    def sound(self) -> bool:
        """Whether nothing is wrong."""
        return not self.faults


def verify(
    path: str | Path,
    *,
    layers: Sequence[int] | None = None,
    module: str | None = None,
    activation: str | None = None,
    top_k: int | None = None,
    most: int = 100,
    on_expert: OnExpert = lambda layer, nbytes, total: None,
) -> Verification:
    """Read the experts of a checkpoint and look for anything that is wrong.

    Of packed files: the index, missing and surplus layers, headers, and the checksum of each tensor
    of each expert. Of safetensors and GGUF files: that the files are there, and whole; that each
    tensor of each expert is there, of the shape and type that the configuration means, and inside
    its file. Of all: that weights that are floats, and scales, are finite. Memory holds one expert.

    Parameters
    ----------
    path : path
        A checkpoint as `ktk.MoE.from_checkpoint` takes it.
    layers : sequence of int, optional
        By default all that have experts.
    module, activation, top_k : optional
        As of `ktk.MoE.from_checkpoint`.
    most : int
        Faults that are kept; further ones are counted.
    on_expert : function, optional
        See `OnExpert`.

    Returns
    -------
    Verification
        Faults are returned and not raised.
    """
    result = Verification(Path(path))
    reading = {"module": module, "activation": activation, "top_k": top_k}
    seen: set[int] = set()
    for fault in _faults(result, layers, reading, on_expert):
        # What is shared by experts would be said once for each of them.
        if hash(fault.message) in seen:
            continue
        seen.add(hash(fault.message))
        if len(result.faults) < most:
            result.faults.append(fault)
        else:
            result.more += 1
    return result


def _faults(
    result: Verification,
    layers: Sequence[int] | None,
    reading: dict[str, Any],
    on_expert: OnExpert,
) -> Iterator[Fault]:
    try:
        with open_checkpoint(result.path, **reading) as checkpoint:
            yield from (Fault(str(error)) for error in checkpoint.faults())
            there = checkpoint.layers()
            if not there:
                yield Fault(f"{result.path} has no experts that ktk knows by name")
            wanted = there if layers is None else list(dict.fromkeys(map(operator.index, layers)))
            result.layers = tuple(wanted)
            found: list[LayerReader] = []
            for number in wanted:
                layer, errors = checkpoint.examine(number)
                yield from (Fault(str(error), number) for error in errors)
                if layer is not None:
                    found.append(layer)
            total = sum(layer.nbytes for layer in found)
            for layer in found:
                for expert in range(layer.config.num_experts):
                    before = result.nbytes
                    yield from _of_expert(layer, expert, result)
                    result.experts += 1
                    on_expert(layer.number, result.nbytes - before, total)
                checkpoint.close()
    except CheckpointError as error:
        yield Fault(str(error))


def _of_expert(layer: LayerReader, expert: int, result: Verification) -> Iterator[Fault]:
    try:
        for piece in layer.pieces(expert):
            result.nbytes += piece.data.size
            for what in piece.faults():
                message = f"tensor {piece.name} in {piece.file}, expert {expert}: {what}"
                yield Fault(message, layer.number, expert, piece.name, str(piece.file))
        layer.check_expert(expert)
    except CheckpointError as error:
        yield Fault(str(error), layer.number, expert)
