"""How experts get from files into a backend: the one rule of loading and of converting.

Where a backend takes what is stored, it gets that, and keeps each bit if it can. Otherwise weights
are decoded to f32 and quantised: by the backend, or by `ktk.quantize` if it only takes codes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ktk._core import Format
from ktk.aliases import find_alias
from ktk.checkpoint.matrix import Matrix
from ktk.checkpoint.spans import spans
from ktk.errors import CheckpointError, CheckpointFormatError
from ktk.quantize import Quantized, quantize
from ktk.registry import backends

if TYPE_CHECKING:
    from ktk.backend import Backend
    from ktk.checkpoint.open import OpenCheckpoint
    from ktk.moe import Formats

PARTS = ("gate", "up", "down")
_FLOATS = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
#: Chooses what to store: of a part, what is given, and whether that was decoded; or a ValueError.
Choose = Callable[[str, Matrix, bool], Format]
Read = Callable[[int], Mapping[str, Any]]


@dataclass(frozen=True)
class Route:
    """The way of one layer's experts into a backend.

    Attributes
    ----------
    backend
        Where they go.
    source
        What gate, up and down are in the files.
    given
        What `read` returns them as: the same, or f32.
    stored
        What the backend makes of that.
    read
        Reads an expert: arguments of `MoE.load_expert`, if the backend takes what is given.
    quantiser
        Who makes codes of what the backend takes.
    """

    backend: Backend
    source: Mapping[str, Matrix]
    given: Mapping[str, Matrix]
    stored: Mapping[str, Format]
    read: Read
    quantiser: str

    @property
    def how(self) -> str:
        """What happens to the weights, for people: "stored as they are", "rounded" ..."""
        decoded = any(self._changes(part, self.source, self.given[part].format) for part in PARTS)
        if not any(self._changes(part, self.given, self.stored[part]) for part in PARTS):
            return "decoded to f32" if decoded else "stored as they are"
        plain = all(fmt.scale == "none" for fmt in self.stored.values())
        who = self.quantiser if all(map(self._takes, PARTS)) else "ktk.quantize"
        what = "rounded" if plain else f"quantised by {who}"
        return f"decoded to f32 and {what}" if decoded else what

    @property
    def requantises(self) -> bool:
        """Whether codes become other codes: their errors add up."""
        return any(
            fmt.element not in _FLOATS.values()
            and self.source[part].format.element not in _FLOATS.values()
            and self._changes(part, self.source, fmt)
            for part, fmt in self.stored.items()
        )

    @property
    def packed_nbytes(self) -> int:
        """Bytes of one expert as the backend packs it, by the variant that would run here."""
        core = self.backend.core
        each = ((self.stored[part], one.n, one.k) for part, one in self.given.items())
        return sum(int(core.packed_size(fmt, n, k)) for fmt, n, k in each)

    def expert(self, number: int) -> Mapping[str, Any]:
        """Read an expert and return the arguments of `MoE.load_expert`.

        Raises
        ------
        CheckpointError
            It is damaged, or a weight is not finite, which cannot be quantised.
        """
        read = self.read(number)
        if all(self._takes(part) for part in PARTS):
            return read
        found = {name: bias for name, bias in read.items() if name.endswith("_bias")}
        for part, matrix in matrices(read).items():
            if not self._takes(part):
                matrix = self.quantized(part, number, matrix)
            found[part] = matrix
        return found

    def quantized(self, part: str, number: int, matrix: Quantized) -> Quantized:
        """Return a matrix as `ktk.quantize` makes what the backend stores."""
        try:
            return quantize(matrix.dequantize(torch.float32), self.stored[part])
        except ValueError as error:
            raise CheckpointError(f"{part} of expert {number}: {error}") from error

    def _changes(self, part: str, before: Mapping[str, Matrix], after: Format) -> bool:
        one = before[part]
        return not one.format.same_as(after, one.n, one.k)

    def _takes(self, part: str) -> bool:
        return takes(self.backend, self.given[part], self.stored[part])


def route_of(
    checkpoint: OpenCheckpoint, layer: Any, backend: Backend, choose: Choose | None = None
) -> Route:
    """Find the way of a layer's experts into a backend, without reading them.

    Parameters
    ----------
    checkpoint, layer
        From `open_checkpoint` and its `layer`.
    backend
        Where they are to go.
    choose
        What to store; by default what the backend likes best.

    Raises
    ------
    CheckpointFormatError
        There is no way from what is stored to what the backend stores.
    """
    choose = choose or chooser(backend)
    source = checkpoint.formats(layer)
    floats = {part: replace(matrix, format=Format("f32")) for part, matrix in source.items()}
    refusals = []
    ways: list[tuple[bool, Mapping[str, Matrix], Read]] = []
    try:
        as_stored = checkpoint.formats_for(layer, backend)
        ways.append((False, as_stored, checkpoint.reader(layer, backend)))
    except CheckpointFormatError as error:
        refusals.append(str(error))
    ways.append((True, floats, lambda expert: checkpoint.values(layer, expert, torch.float32)))
    for decoded, given, read in ways:
        stored = {}
        try:
            for part in PARTS:
                stored[part] = choose(part, given[part], decoded)
        except ValueError as error:
            refusals.append(f"{part}: {error}")
            continue
        return Route(backend, source, given, stored, read, backend.name)
    _, here = checkpoint.storage(layer)
    raise CheckpointFormatError(
        f"the experts are {here}, and {backend.name} cannot be made of that: "
        + "; ".join(dict.fromkeys(refusals))
    )


def format_named_by(backend: str | Backend | None) -> Format | None:
    """Return the format that a name stands for beside its backend: MXFP8 is a format of FP8."""
    alias = find_alias(backend, backends()) if isinstance(backend, str) else None
    return alias.format if alias else None


def chooser(backend: Backend, wanted: Formats | None = None, named: Format | None = None) -> Choose:
    """Return what chooses the format that is wanted, else the one that the backend likes best.

    `named` is what `ktk.quantize` makes for a backend that takes codes only.
    """
    formats = wanted if isinstance(wanted, tuple) else (wanted,) * len(PARTS)
    each = dict(zip(PARTS, formats, strict=True))

    def choose(part: str, given: Matrix, decoded: bool) -> Format:
        asked = each[part]
        try:
            made: Format = backend.core.stored_as(given.format, given.n, given.k, asked)
        except ValueError:
            if not decoded:
                raise
        else:
            return made
        stored = asked or (named if named in backend.formats else None) or backend.formats[0]
        if stored not in backend.formats:
            raise ValueError(f"{backend.name} does not store weights as {stored}")
        if stored.scale == "none" and stored.element not in _FLOATS.values():
            raise ValueError(f"it takes weights as they are, such as {stored}, and makes none")
        return checked(stored, given)

    return choose


def checked(stored: Format, given: Matrix) -> Format:
    """Return the format; ValueError where rows of a matrix are not whole bytes of it."""
    columns, _ = stored.block
    if given.k % columns:
        raise ValueError(f"a depth of {given.k} does not fill whole bytes of {stored.element}")
    return stored


def takes(backend: Backend, given: Matrix, stored: Format) -> bool:
    """Whether a backend itself makes the stored format of what is given."""
    try:
        backend.core.stored_as(given.format, given.n, given.k, stored)
    except ValueError:
        return False
    return True


def matrices(read: Mapping[str, Any]) -> dict[str, Quantized]:
    """Put the arguments of `MoE.load_expert` together, gate, up and down."""
    given = read.get("given")
    formats = given if isinstance(given, tuple) else (given,) * len(PARTS)
    found = {}
    for part, fmt in zip(PARTS, formats, strict=True):
        data = torch.as_tensor(read[part])
        scale, zero = (
            None if array is None else torch.as_tensor(array)
            for array in (read.get(f"{part}_{what}") for what in ("scale", "zero"))
        )
        found[part] = Quantized(fmt or Format(_FLOATS[data.dtype]), data, scale, zero)
    return found


def summaries(routes: Mapping[int, Route]) -> Iterator[tuple[str, bool]]:
    """Yield one line for layers alike that says what becomes of them, and if they are requantised.

    Parameters
    ----------
    routes
        By number of the layer.
    """
    alike: dict[tuple[str, str, bool], list[int]] = {}
    for number, route in routes.items():
        formats = ", ".join(dict.fromkeys(map(str, route.stored.values())))
        alike.setdefault((route.how, formats, route.requantises), []).append(number)
    for (how, formats, again), numbers in alike.items():
        yield f"layers {spans(numbers)}: {how}; {formats}", again
