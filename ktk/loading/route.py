"""How experts get from files into a backend: the one rule of loading and of converting.

Where a backend takes what is stored, it gets that, and keeps each bit if it can. Otherwise weights
are decoded to f32 and quantised: by the backend, or by `ktk.quantize` if it only takes codes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from ktk._core import Format
from ktk.backend import Backend
from ktk.checkpoint.matrix import MatrixInfo
from ktk.checkpoint.reader import LayerReader
from ktk.checkpoint.spans import spans
from ktk.config import PARTS
from ktk.errors import CheckpointError, CheckpointFormatError
from ktk.expert import Expert, Matrix
from ktk.formats import FLOATS, formats_of_parts, is_blocks
from ktk.loading.finer import finer_formats, regrouped
from ktk.moe import Formats
from ktk.names import find_alias
from ktk.quantize import dequantize, quantize
from ktk.registry import backends

#: Chooses what to store: of a part, what is given, and whether that was decoded; or a ValueError.
Choose = Callable[[str, MatrixInfo, bool], Format]
_F32 = Format("f32")


@dataclass(frozen=True)
class Route:
    """The way of one layer's experts into a backend.

    Attributes
    ----------
    layer
        Where they come from.
    backend
        Where they go.
    given
        What `read` returns gate, up and down as: as they are in the files, in finer groups, or f32.
    stored
        What the backend makes of that.
    quantizer
        Who makes codes of what the backend takes.
    """

    layer: LayerReader
    backend: Backend
    given: Mapping[str, MatrixInfo]
    stored: Mapping[str, Format]
    quantizer: str

    @property
    def source(self) -> Mapping[str, MatrixInfo]:
        """What gate, up and down are in the files."""
        return self.layer.formats

    @property
    def how(self) -> str:
        """What happens to the weights, for people: "stored as they are", "rounded" ..."""
        given, decoded = self.given, self.decoded
        if not any(self._changes(part, given, fmt) for part, fmt in self.stored.items()):
            return "decoded to f32" if decoded else "stored as they are"
        plain = all(fmt.scale == "none" for fmt in self.stored.values())
        who = self.quantizer if all(map(self._takes, given)) else "ktk.quantize"
        what = "rounded" if plain else f"quantised by {who}"
        return f"decoded to f32 and {what}" if decoded else what

    @property
    def decoded(self) -> bool:
        """Whether a matrix becomes f32 that was in codes."""
        return self.layer.decodes or any(map(self.decodes, self.given))

    @property
    def origin(self) -> str:
        """What decoded weights are in the files, and why they are decoded if that is not plain."""
        return ", ".join(filter(None, (self.layer.storage.dtype, self.layer.decoded_because)))

    @property
    def requantizes(self) -> bool:
        """Whether codes become other codes: their errors add up."""
        return any(
            fmt.element not in FLOATS
            and (self.layer.decodes or self.source[part].format.element not in FLOATS)
            and (self.decodes(part) or self._changes(part, self.given, fmt))
            for part, fmt in self.stored.items()
        )

    @property
    def packed_nbytes(self) -> int:
        """Bytes of one expert as the backend packs it, by the variant that would run here."""
        core = self.backend.core
        each = ((self.stored[part], one.n, one.k) for part, one in self.given.items())
        return sum(int(core.packed_size(fmt, n, k)) for fmt, n, k in each)

    def decodes(self, part: str) -> bool:
        """Whether a matrix is read as f32, though the files have it otherwise."""
        return self.given[part].format == _F32 != self.source[part].format

    def read(self, number: int) -> Expert:
        """Read an expert as `given` says."""
        matrices = self.layer.expert(number, [*filter(self.decodes, self.given)]).matrices
        for part, one in self.given.items():
            if matrices[part].format != one.format:
                matrices[part] = regrouped(matrices[part], one.format, one.k)
        return Expert(**matrices)

    def expert(self, number: int) -> Expert:
        """Read an expert in formats that the backend takes.

        Raises
        ------
        CheckpointError
            It is damaged, or a weight is not finite, which cannot be quantised.
        """
        matrices = self.read(number).matrices
        for part, matrix in matrices.items():
            if not self._takes(part):
                matrices[part] = self.quantized(part, number, matrix)
        return Expert(**matrices)

    def unread(self, number: int) -> Expert:
        """Read an expert as `expert` does; an `UnreadExpert` leaves the rest to who packs it."""
        as_stored = all(
            self.source[part].format == one.format and self._takes(part)
            for part, one in self.given.items()
        )
        return self.layer.unread(number) if as_stored else self.expert(number)

    def quantized(self, part: str, number: int, matrix: Matrix) -> Matrix:
        """Return a matrix as `ktk.quantize` makes what the backend stores."""
        try:
            made = quantize(dequantize(matrix), self.stored[part])
        except ValueError as error:
            raise CheckpointError(f"{part} of expert {number}: {error}") from error
        return replace(made, bias=matrix.bias)

    def _changes(self, part: str, before: Mapping[str, MatrixInfo], after: Format) -> bool:
        one = before[part]
        return not one.format.same_as(after, one.n, one.k)

    def _takes(self, part: str) -> bool:
        return takes(self.backend, self.given[part], self.stored[part])


def route_of(layer: LayerReader, backend: Backend, choose: Choose | None = None) -> Route:
    """Find the way of a layer's experts into a backend, without reading them.

    Parameters
    ----------
    layer
        Of an open checkpoint.
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
    refusals = []
    ways: list[tuple[bool, Mapping[str, MatrixInfo]]] = []
    try:
        ways.append((False, taken(layer, backend)))
    except CheckpointFormatError as error:
        refusals.append(str(error))
    ways.append((True, {part: replace(one, format=_F32) for part, one in layer.formats.items()}))
    for decoded, given in ways:
        stored = {}
        try:
            for part, one in given.items():
                stored[part] = choose(part, one, decoded)
        except ValueError as error:
            refusals.append(f"{part}: {error}")
            continue
        return Route(layer, backend, given, stored, backend.name)
    raise CheckpointFormatError(
        f"the experts are {layer.storage.dtype}, and {backend.name} cannot be made of that: "
        + "; ".join(dict.fromkeys(refusals))
    )


def taken(layer: LayerReader, backend: Backend) -> dict[str, MatrixInfo]:
    """Return what a backend takes of a layer: each matrix as it is stored, or blocks as f32.

    Files of blocks mix types, so that each matrix is decoded for itself where its type is not
    taken; groups that are too large are divided. What was converted for a backend has to be kept
    as it is.

    Raises
    ------
    CheckpointFormatError
        The backend does not take a matrix.
    """
    found = {}
    for part, one in layer.formats.items():
        reason = _refusal(backend, one, keep=layer.recorded_backend is not None)
        if reason and (finer := _finer(backend, one)):
            one, reason = finer, ""
        if reason and is_blocks(one.format):
            one = replace(one, format=_F32)
            reason = _refusal(backend, one)
        if reason:
            raise CheckpointFormatError(layer.refused(part, backend.name, reason))
        found[part] = one
    return found


def _refusal(backend: Backend, one: MatrixInfo, *, keep: bool = False) -> str:
    """Return why a backend does not take a matrix, or does not keep it; empty if it does."""
    try:
        stored = backend.core.stored_as(one.format, one.n, one.k)
    except ValueError as error:
        return str(error)
    if keep and not stored.same_as(one.format, one.n, one.k):
        return f"it would make {stored} of {one.format}"
    return ""


def _finer(backend: Backend, one: MatrixInfo) -> MatrixInfo | None:
    """Return a matrix in the coarsest of finer groups that a backend keeps; None if it has none."""
    each = (replace(one, format=fmt) for fmt in finer_formats(one.format, backend.accepts))
    return next((finer for finer in each if not _refusal(backend, finer, keep=True)), None)


def fitted(part: str, matrix: Matrix, backend: Backend, choose: Choose) -> Matrix:
    """Return a matrix as a backend takes it: as it is if that will do, or decoded, or in new codes.

    Parameters
    ----------
    part
        gate, up or down.
    matrix
        Of tensors, with its format.
    backend
        Where it goes.
    choose
        What to store, as of `route_of`.

    Raises
    ------
    CheckpointFormatError
        There is no way from what is given to what the backend stores.
    ValueError
        A weight is not finite, which cannot be quantised.
    """
    assert matrix.format is not None
    columns = matrix.data.shape[1] * (2 if matrix.format.block[0] == 2 else 1)
    given = MatrixInfo(matrix.format, matrix.data.shape[0], columns)
    if _refusal(backend, given) and (finer := _finer(backend, given)):
        given, matrix = finer, regrouped(matrix, finer.format, columns)
    refusals = []
    for decoded in (False, True):
        one = replace(given, format=_F32) if decoded else given
        try:
            stored = choose(part, one, decoded)
        except ValueError as error:
            refusals.append(str(error))
            continue
        if decoded:
            matrix = Matrix(_F32, dequantize(matrix), bias=matrix.bias)
        if takes(backend, one, stored):
            return matrix
        return replace(quantize(dequantize(matrix), stored), bias=matrix.bias)
    raise CheckpointFormatError(
        f"is stored as {given.format}, and {backend.name} cannot be made of that: "
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
    found = formats_of_parts("weight_format", wanted)
    formats = found if isinstance(found, tuple) else (found,) * len(PARTS)
    each = dict(zip(PARTS, formats, strict=True))

    def choose(part: str, given: MatrixInfo, decoded: bool) -> Format:
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
        if stored.scale == "none" and stored.element not in FLOATS:
            raise ValueError(f"it takes weights as they are, such as {stored}, and makes none")
        return checked(stored, given)

    return choose


def checked(stored: Format, given: MatrixInfo) -> Format:
    """Return the format; ValueError where rows of a matrix are not whole bytes of it."""
    columns, _ = stored.block
    if given.k % columns:
        raise ValueError(f"a depth of {given.k} does not fill whole bytes of {stored.element}")
    return stored


def takes(backend: Backend, given: MatrixInfo, stored: Format) -> bool:
    """Whether a backend itself makes the stored format of what is given."""
    try:
        backend.core.stored_as(given.format, given.n, given.k, stored)
    except ValueError:
        return False
    return True


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
        if route.decoded:
            formats += f" (from {route.origin})"
        alike.setdefault((route.how, formats, route.requantizes), []).append(number)
    for (how, formats, again), numbers in alike.items():
        yield f"layers {spans(numbers)}: {how}; {formats}", again
