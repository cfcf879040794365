"""The limits of the machine, and the time they leave for a layer: the roofline.

A layer has to read the packed bytes of the experts it hits once, and to do its multiplications.
Neither can be faster than the machine, so

    limit_seconds = max(bytes / read bandwidth, operations / peak of the unit)

and ``fraction = limit_seconds / measured seconds`` is 1 for a perfect implementation. Activations
and outputs are not counted: they are small, and a lower bound stays a bound.

*The unit* of a variant is the fastest that its instruction sets offer for what it multiplies:
integer units for int8 activations, floating-point ones for bf16, f16 and f32, and either for int16,
which small codes of weights are multiplied with. It is not tied to one instruction:
``vdpbf16ps`` does twice the operations of a ``vfmadd`` on AMD Zen 5 and half of them on Intel's
servers, where a bf16 kernel can widen its weights and use the f32 unit instead.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

from ktk import _core, _probe
from ktk.bench.machine import undisturbed
from ktk.system import available_memory, last_level_cache_bytes

if TYPE_CHECKING:
    from ktk.backend import Backend


class _Element(Protocol):
    @property
    def element(self) -> str: ...


class _Variant(Protocol):
    """What is needed of `ktk._core.VariantInfo`."""

    @property
    def required_isa(self) -> Sequence[str]: ...
    @property
    def act(self) -> _Element: ...


@dataclass(frozen=True)
class Limits:
    """What the machine can do with `threads` threads.

    Attributes
    ----------
    threads : int
    read_bytes_per_s : float
        Reading memory from end to end, far more of it than the caches hold.
    peak_ops_per_s : mapping of str to float
        Operations per second of each unit, registers only. A multiply and an add are two.
    """

    threads: int
    read_bytes_per_s: float
    peak_ops_per_s: Mapping[str, float]

    def peak(self, units: Iterable[str]) -> float:
        """Return the highest peak among `units`; those that were not measured do not count."""
        return max((self.peak_ops_per_s.get(unit, 0.0) for unit in units), default=0.0)


@dataclass(frozen=True)
class Roofline:
    """The shortest time possible, and which of the two limits sets it."""

    memory_seconds: float
    compute_seconds: float

    @property
    def seconds(self) -> float:
        """Return the larger of the two bounds."""
        return max(self.memory_seconds, self.compute_seconds)

    @property
    def bound(self) -> str:
        """Return ``"memory"`` or ``"compute"``."""
        return "memory" if self.memory_seconds >= self.compute_seconds else "compute"

    def fraction(self, seconds: float) -> float:
        """Return the share of the limit that a measured time reaches."""
        return self.seconds / seconds


def roofline(limits: Limits, *, nbytes: float, flops: float, units: Iterable[str]) -> Roofline:
    """Return the time the machine needs at least.

    Parameters
    ----------
    limits : Limits
        From `measure_limits`, best in the same minute as the times to compare with.
    nbytes : float
        Packed bytes of the distinct experts that are hit.
    flops : float
        Operations: 6 * tokens * top-k * hidden * intermediate for a gated MoE, 4 * ... for one
        without a gate.
    units : iterable of str
        From `units_of`.
    """
    peak = limits.peak(units)
    return Roofline(
        memory_seconds=nbytes / limits.read_bytes_per_s,
        compute_seconds=flops / peak if peak else 0.0,
    )


def variant_units(
    variant: _Variant,
    act: _Element | None = None,
    *,
    weights: _Element | None = None,
    library: bool = False,
) -> tuple[str, ...]:
    """Return the units that a variant's instruction sets offer for its activations, best first.

    Parameters
    ----------
    variant
        One of `Backend.variants`.
    act
        What its activations are, where that depends on the weights; default: `variant.act`.
    weights
        What the weights are stored as: codes of up to six bits can be multiplied by instructions
        whose sums of larger ones would not fit. Default: any that the variant takes.
    library
        The backend multiplies with a library of the machine (`Backend.library`), whose code may
        use all that the CPU has, whatever the variant itself requires.
    """
    act_bits = _code_bits(act or variant.act, other=0)
    bits = _code_bits(weights, other=8) if act_bits else 0  # tables have entries of eight
    usable = _core.detected_isa() if library else variant.required_isa

    def multiplies(most_act_bits: int, most_bits: int) -> bool:
        if most_act_bits == 0:
            return act_bits in (0, 16)
        return 0 < act_bits <= most_act_bits and bits <= most_bits

    return tuple(
        unit
        for unit, most_act_bits, most_bits, needs in reversed(_probe.all_units())
        if multiplies(most_act_bits, most_bits) and set(needs) <= set(usable)
    )


def units_of(
    backend: Backend, name: str, stored: _core.Format, rows: int, columns: int
) -> tuple[str, ...]:
    """Return the units that can multiply certain weights, best first.

    Parameters
    ----------
    backend, name
        What computes, and the name of its variant.
    stored
        What the weights are stored as.
    rows, columns
        Of their matrix, of experts gate or up.
    """
    [variant] = (one for one in backend.variants if one.name == name)
    act = variant.act_of(stored, rows, columns)
    return variant_units(variant, act, weights=stored, library=backend.library is not None)


def _code_bits(element: _Element | None, *, other: int) -> int:
    """Return the bits of integers that an element is multiplied as; `other` for what is none."""
    named = re.fullmatch(r"([iu]\d+|q\d).*", element.element) if element else None
    return int(named[1][1:]) if named else other


def default_buffer_bytes() -> int:
    """Return the bytes to read: 4 x the last-level cache, 1 to 4 GiB, if so many are free."""
    wanted = min(max(4 * last_level_cache_bytes(), 1 << 30), 4 << 30)
    return max(min(wanted, available_memory() // 3), 64 << 20)


class LimitProbe:
    """Measures limits again and again without making its buffer anew.

    Parameters
    ----------
    threads : int
    cpus : sequence of int, optional
        Where to pin them; default: the first of the affinity mask. Give it the CPUs of the worker
        pool that the limits are compared with.
    buffer_bytes : int, optional
        Memory to read from, see `default_buffer_bytes`.
    """

    def __init__(
        self, threads: int, *, cpus: Sequence[int] = (), buffer_bytes: int | None = None
    ) -> None:
        self.threads = threads
        self.cpus = list(cpus)
        self._buffer_bytes = buffer_bytes
        self._reader: _probe.Reader | None = None

    def read(self, seconds: float) -> float:
        """Return the bytes per second read from memory."""
        if self._reader is None:
            nbytes = self._buffer_bytes or default_buffer_bytes()
            self._reader = _probe.Reader(nbytes, self.threads, self.cpus)
        return self._reader.measure(seconds)

    def peak(self, unit: str, seconds: float) -> float:
        """Return the operations per second of one unit."""
        return _probe.peak(unit, self.threads, seconds, self.cpus)


def measure_limits(
    threads: int,
    *,
    units: Iterable[str] | None = None,
    seconds: float = 0.2,
    rounds: int = 3,
    cpus: Sequence[int] = (),
    buffer_bytes: int | None = None,
) -> Limits:
    """Measure what the machine can do.

    Parameters
    ----------
    threads : int
        Pinned threads, one per CPU.
    units : iterable of str, optional
        Which units; default: all that can run here. Those that cannot are left out.
    seconds : float
        Length of one reading of memory; units take a quarter. Each is measured `rounds` times in
        turn, and the median counts.
    cpus, buffer_bytes
        See `LimitProbe`.
    """
    here = _probe.units()
    wanted = here if units is None else [unit for unit in here if unit in set(units)]
    probe = LimitProbe(threads, cpus=cpus, buffer_bytes=buffer_bytes)
    read: list[float] = []
    peaks: dict[str, list[float]] = {unit: [] for unit in wanted}
    for _ in range(rounds):
        # Peaks are counted per CPU time and need no quiet machine.
        read.append(undisturbed(partial(probe.read, seconds), tries=3).value)
        for unit, found in peaks.items():
            found.append(probe.peak(unit, seconds / 4))
    return Limits(
        threads=threads,
        read_bytes_per_s=statistics.median(read),
        peak_ops_per_s={unit: statistics.median(found) for unit, found in peaks.items()},
    )
