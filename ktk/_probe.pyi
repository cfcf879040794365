from collections.abc import Sequence

def units() -> list[str]:
    """Names of the arithmetic units that can run here."""

def all_units() -> list[tuple[str, int, int, list[str]]]:
    """(name, the most bits of integers that activations may be or 0 for floats, the most bits of
    weights, instruction sets that it needs) of the units that this build has, best last."""

def peak(unit: str, threads: int, seconds: float, cpus: Sequence[int] = ...) -> float:
    """Operations per second (a multiply and an add are two) of all threads together."""

def read_bandwidth(
    buffer_bytes: int, threads: int, seconds: float, cpus: Sequence[int] = ...
) -> float:
    """Bytes per second that the threads together read from a buffer of this size."""

class Reader:
    """A buffer to measure read bandwidth with, again and again."""

    def __init__(self, buffer_bytes: int, threads: int, cpus: Sequence[int] = ...) -> None: ...
    def measure(self, seconds: float) -> float:
        """Bytes per second of all threads together."""

    @property
    def pattern(self) -> str:
        """The way of reading that was fastest here."""

    @property
    def nbytes(self) -> int: ...
