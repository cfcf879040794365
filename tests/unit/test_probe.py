"""The limits of the machine: plausible, and refused with a sentence where not measurable."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys
import threading
from collections import Counter

import pytest

from ktk import _core, _probe

X86 = platform.machine() in ("x86_64", "AMD64")


def test_units_follow_the_instruction_sets_of_the_cpu() -> None:
    isa = _core.detected_isa()
    units = _probe.units()
    assert ("amx_int8" in units) == ("amx_int8" in isa)
    assert ("avx512_fma" in units) == ("avx512" in isa)
    assert ("avx2_fma" in units) == ("avx2" in isa)


@pytest.mark.skipif(not X86, reason="units are measured on x86-64 only")
def test_peaks_are_those_of_a_processor() -> None:
    for unit in _probe.units():
        peak = _probe.peak(unit, 1, 0.02)
        assert 1e9 < peak < 1e14, f"{unit}: {peak:.3g} operations per second"


@pytest.mark.skipif(not X86, reason="units are measured on x86-64 only")
def test_wider_units_are_not_slower() -> None:
    """A loop that were optimised away, or that counted wrong, would break the order by far."""
    units = _probe.units()
    peak = {unit: max(_probe.peak(unit, 1, 0.02) for _ in range(3)) for unit in units}
    for slow, fast in (
        ("avx2_madd", "avx2_maddubs"),
        ("avx512_bw", "avx512_maddubs"),
        ("avx2_madd", "avx512_vnni"),
        ("avx512_vnni_words", "avx512_vnni"),
        ("avx2_madd", "avx_vnni"),
        ("avx512_vnni", "amx_int8"),
        ("avx512_bf16", "amx_bf16"),
    ):
        if slow in peak and fast in peak:
            assert peak[fast] > 1.2 * peak[slow], (
                f"{fast} {peak[fast]:.3g}, {slow} {peak[slow]:.3g}"
            )


def test_memory_is_slower_than_the_cache() -> None:
    memory = max(_probe.read_bandwidth(256 << 20, 1, 0.05) for _ in range(2))
    cache = max(_probe.read_bandwidth(1, 1, 0.05) for _ in range(2))  # one huge page
    assert 1e8 < memory < 1e13, f"{memory:.3g} bytes per second"
    assert cache > memory, f"2 MiB: {cache:.3g}, 256 MiB: {memory:.3g} bytes per second"


def test_reader_keeps_the_best_pattern() -> None:
    reader = _probe.Reader(64 << 20, 1)
    assert reader.nbytes == 64 << 20
    assert reader.pattern == ""
    first = reader.measure(0.02)
    pattern = reader.pattern
    assert pattern
    # The best of some: on a busy machine, other programs have the CPU for as long.
    assert max(reader.measure(0.02) for _ in range(10)) > 0.2 * first
    assert reader.pattern == pattern


def test_threads_run_on_the_given_cpus() -> None:
    before = os.sched_getaffinity(0)
    cpu = max(before)
    others = set(os.listdir("/proc/self/task"))
    seen: Counter[frozenset[int]] = Counter()
    ended = threading.Event()

    def watch() -> None:
        mine = str(threading.get_native_id())
        while not ended.wait(0.001):
            for task in set(os.listdir("/proc/self/task")) - others - {mine}:
                with contextlib.suppress(ProcessLookupError):
                    seen[frozenset(os.sched_getaffinity(int(task)))] += 1

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        assert _probe.read_bandwidth(4 << 20, 1, 0.1, [cpu]) > 0
    finally:
        ended.set()
        watcher.join()
    # A thread begins with its parent's mask, for a moment.
    assert seen.most_common(1)[0][0] == {cpu}
    assert os.sched_getaffinity(0) == before, "the caller's own mask must stay as it was"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1 << 20, 0, 0.01), "threads must be at least 1"),
        ((1 << 20, 100_000, 0.01), "100000 threads need as many CPUs"),
        ((1 << 20, 1, 0.0), "seconds must be above 0"),
        ((1 << 20, 1, float("nan")), "seconds must be above 0"),
        ((0, 1, 0.01), "buffer_bytes must be above 0"),
        ((-1, 1, 0.01), "buffer_bytes must be above 0"),
        ((1 << 20, 1, 0.01, [8191]), "CPU 8191 is not in the affinity mask"),
    ],
)
def test_bad_arguments_are_named(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _probe.read_bandwidth(*arguments)  # type: ignore[arg-type]


def test_unknown_unit_lists_the_known() -> None:
    with pytest.raises(ValueError, match="no unit 'mmx'"):
        _probe.peak("mmx", 1, 0.01)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one CPU")
def test_threads_that_the_system_refuses_are_an_error() -> None:
    """Whichever it is: the first, or one that others wait for."""
    code = """
import resource, sys
from ktk import _probe
[size] = [int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmSize")]
resource.setrlimit(resource.RLIMIT_AS, (size * 1024 + (int(sys.argv[1]) << 20),) * 2)
try:
    _probe.peak(_probe.units()[0], 2, 0.01)
except RuntimeError as error:
    print(error)
"""
    refused = []
    for spare in (4, 10, 14):  # MiB, where a thread's stack takes eight
        done = subprocess.run(
            ["sh", "-c", 'ulimit -s 8192; exec "$@"', "sh", sys.executable, "-c", code, str(spare)],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        refused.append(done.stdout)
    assert "the system started 0 of " in refused[0]
    assert any("the system started 1 of 2 threads" in one for one in refused[1:])
