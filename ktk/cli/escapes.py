"""What BF16Z would make of the weights of a checkpoint, for `ktk inspect --escapes`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from rich.table import Table

from ktk import _core
from ktk.backend import Backend
from ktk.checkpoint import open_checkpoint
from ktk.checkpoint.reader import LayerReader
from ktk.errors import CheckpointError
from ktk.names import FEWER_BITS
from ktk.progress import Progress
from ktk.registry import load_backend
from ktk.sizes import size_text
from ktk.terminal import plain_table

# As backends/bf16z/layout.h has them: rows of a weight that share a table of exponents, what that
# has room for, and, for each 32 columns, the patches that the block has room for.
_ROWS, _EXPONENTS, _STEP, _PATCHES = 32, 16, 32, 4


@dataclass(frozen=True)
class Escapes:
    """What is found in bf16 weights of one layer, or of several.

    Attributes
    ----------
    weights
        How many there are.
    escapes
        Those whose exponent is none of the 16 most frequent ones of their block of 32 rows.
    blocks, overflowing
        How many there are, and which have more escapes than their side area has room for.
    matrices, plain
        How many there are, and which have such a block: they are stored in 16 bits.
    nbytes
        Of all matrices as BF16Z stores them.
    """

    weights: int = 0
    escapes: int = 0
    blocks: int = 0
    overflowing: int = 0
    matrices: int = 0
    plain: int = 0
    nbytes: int = 0

    def __add__(self, other: Escapes) -> Escapes:
        return Escapes(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Escapes)))

    @property
    def share(self) -> float:
        """Of the weights that are escapes."""
        return self.escapes / max(self.weights, 1)

    @property
    def bits_per_weight(self) -> float:
        """As BF16Z stores them, tables and side areas included."""
        return 8 * self.nbytes / max(self.weights, 1)

    def document(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        return asdict(self) | {"share": self.share, "bits_per_weight": self.bits_per_weight}


@dataclass(frozen=True)
class Report:
    """What is found in each layer that is bf16, and how the others are stored, by number."""

    layers: dict[int, Escapes]
    others: dict[int, str]

    @property
    def total(self) -> Escapes:
        """Of all layers that are bf16."""
        return sum(self.layers.values(), Escapes())

    @property
    def reason(self) -> str:
        """A sentence about layers that are not bf16; empty if all are."""
        if not self.others:
            return ""
        stored = "; ".join(dict.fromkeys(self.others.values()))
        which = "Other layers are" if self.layers else "The experts are"
        return (
            f"{which} stored as {stored}: escapes are counted of bf16 weights, the only ones that "
            f"{FEWER_BITS} makes smaller without loss."
        )

    def document(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        layers = [{"number": n} | found.document() for n, found in self.layers.items()]
        return {"layers": layers, "total": self.total.document(), "reason": self.reason or None}


def count_escapes(path: Path, **options: Any) -> Report:
    """Read the experts of all layers that are bf16; options of `open_checkpoint`.

    Layers that are damaged are left out.

    Raises
    ------
    BackendError
        BF16Z cannot run here.
    CheckpointError
        A weight is damaged.
    """
    backend = load_backend(FEWER_BITS)
    report = Report({}, {})
    with open_checkpoint(path, **options) as checkpoint:
        readers = []
        for number in checkpoint.layers():
            try:
                layer = checkpoint.layer(number)
            except CheckpointError:
                continue
            if {info.format.element for info in layer.formats.values()} == {"bf16"}:
                readers.append(layer)
            else:
                report.others[number] = layer.storage.dtype
        with Progress(sum(layer.nbytes for layer in readers)) as progress:
            for layer in readers:
                experts = layer.config.num_experts
                found = Escapes()
                for one in _of_experts(layer, backend):
                    found += one
                    progress.advance(layer.nbytes / experts, f"layer {layer.number}")
                report.layers[layer.number] = found
                checkpoint.close()
    return report


def _of_experts(layer: LayerReader, backend: Backend) -> Iterable[Escapes]:
    for number in range(layer.config.num_experts):
        matrices = layer.expert(number).matrices
        parts = (
            of_matrix(torch.as_tensor(matrices[part].data, device="cpu"), backend)
            for part in matrices
        )
        yield sum(parts, Escapes())


def of_matrix(weight: torch.Tensor, backend: Backend) -> Escapes:
    """Count the escapes of a matrix, bf16 [n, k]."""
    n, k = weight.shape
    counts = _escapes_of_blocks(weight.contiguous().view(torch.int16).numpy().view(np.uint16))
    # Whole cache lines of patches.
    room = -(-_PATCHES * -(-k // _STEP) // 16) * 16
    overflowing = int((counts > room).sum())
    return Escapes(
        weights=n * k,
        escapes=int(counts.sum()),
        blocks=len(counts),
        overflowing=overflowing,
        matrices=1,
        plain=int(overflowing > 0),
        nbytes=_core.PackedMatrix.size_of(backend.core, "", weight),
    )


def _escapes_of_blocks(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.int64]:
    """Count the weights with other exponents than the most frequent ones, block by block."""
    exponents = bits >> 7 & 255
    blocks = (exponents[at : at + _ROWS].ravel() for at in range(0, len(bits), _ROWS))
    counts = np.stack([np.bincount(block, minlength=256) for block in blocks])
    counts.sort(axis=1)
    found: npt.NDArray[np.int64] = counts[:, :-_EXPONENTS].sum(axis=1)
    return found


def escapes_table(report: Report) -> Table:
    """Return the table that `ktk inspect --escapes` prints."""
    table = plain_table(f"in {FEWER_BITS}: weights whose exponent is in no table (escapes)")
    for heading in ("layer", "escapes", "blocks that overflow", "matrices in 16 bits"):
        table.add_column(heading, overflow="fold")
    for heading in ("bytes", "bits per weight"):
        table.add_column(heading)
    rows = [(str(number), found) for number, found in report.layers.items()]
    for name, found in [*rows, ("all", report.total)]:
        table.add_row(
            name,
            f"{found.escapes} ({100 * found.share:.3g} %)",
            f"{found.overflowing} of {found.blocks}",
            f"{found.plain} of {found.matrices}",
            size_text(found.nbytes),
            f"{found.bits_per_weight:.2f}",
        )
    return table
