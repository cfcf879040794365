"""`ktk doctor` reads what Linux says, and has advice for what is in the way."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ktk import BackendInfo, _core, registry, system
from ktk.cli import app, health, report
from ktk.cli.health import isa, software
from ktk.cli.health.finding import Finding
from ktk.cli.health.machine import Machine
from ktk.errors import BackendError, BackendImportError, BackendUnsupported


def tree(root: Path, files: dict[str, str]) -> Path:
    """Write a copy of the parts of /proc and /sys that are read."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


HERE = Machine()
MEMINFO = "MemTotal:       1000 kB\nMemFree:  1 kB\nMemAvailable:   600 kB\n"
KIB = 1024


@pytest.mark.parametrize(
    ("files", "limit", "available"),
    [
        ({}, None, 600 * KIB),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/memory.max": "max\n",
                "sys/fs/cgroup/a/b/memory.current": "1\n",
                "sys/fs/cgroup/a/memory.max": f"{500 * KIB}\n",
                "sys/fs/cgroup/a/memory.current": f"{480 * KIB}\n",
                "sys/fs/cgroup/a/memory.stat": (
                    f"anon {90 * KIB}\nfile {390 * KIB}\nshmem {10 * KIB}\n"
                    f"inactive_file {300 * KIB}\nactive_file {80 * KIB}\n"
                ),
            },
            500 * KIB,
            400 * KIB,
        ),
        (
            {
                "proc/self/cgroup": "5:cpu:/x\n4:hugetlb,memory:/docker/1\n0::/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{300 * KIB}",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{310 * KIB}",
            },
            300 * KIB,
            0,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{300 * KIB}",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{290 * KIB}",
                "sys/fs/cgroup/memory/memory.stat": (
                    f"inactive_file {1 * KIB}\nactive_file {2 * KIB}\n"
                    f"total_inactive_file {50 * KIB}\ntotal_active_file {40 * KIB}\n"
                ),
            },
            300 * KIB,
            100 * KIB,
        ),
        (
            {
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/memory.max": "9223372036854771712\n",
                "sys/fs/cgroup/memory.current": "7\n",
            },
            None,
            600 * KIB,
        ),
    ],
    ids=[
        "no cgroup",
        "version 2, with files in memory",
        "version 1 in a container",
        "version 1, with files in memory",
        "a limit beyond the machine",
    ],
)
def test_memory_is_read_with_the_limits_around_it(
    tmp_path: Path, files: dict[str, str], limit: int | None, available: int
) -> None:
    root = tree(tmp_path, {"proc/meminfo": MEMINFO, **files})
    assert system.total_memory(root) == 1000 * KIB
    assert system.memory_limit(root) == limit
    assert system.available_memory(root) == available


def test_modes_of_huge_pages(tmp_path: Path) -> None:
    assert system.huge_pages(tmp_path) == ""
    name = "sys/kernel/mm/transparent_hugepage/enabled"
    for mode, text in {"never": "always madvise [never]\n", "always": "[always] madvise\n"}.items():
        assert system.huge_pages(tree(tmp_path, {name: text})) == mode


def test_flags_of_the_cpu(tmp_path: Path) -> None:
    assert system.cpu_flags(tmp_path) == set()
    text = "processor : 0\nflags\t\t: fpu amx_tile\n\nprocessor : 1\nflags\t: other\n"
    assert system.cpu_flags(tree(tmp_path, {"proc/cpuinfo": text})) == {"fpu", "amx_tile"}


_STUB = """
int cuInit(unsigned flags) {{ return {status}; }}
int cuDriverGetVersion(int* version) {{ *version = 12080; return 0; }}
int cuDeviceGetCount(int* count) {{ *count = 2; return 0; }}
"""


@pytest.mark.parametrize(
    ("status", "expected", "state", "text"),
    [
        (0, system.Driver(12080, 2), "ok", "CUDA driver 12.8 with 2 devices"),
        (100, system.Driver(0, 0, "cuInit fails with CUresult 100"), "note", "CUresult 100"),
    ],
)
def test_the_driver_is_asked(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    expected: system.Driver,
    state: str,
    text: str,
) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler to make a driver with")
    source, library = tmp_path / "cuda.c", tmp_path / "libcuda.so.1"
    source.write_text(_STUB.format(status=status))
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    assert system.cuda_driver(str(library)) == expected
    monkeypatch.setattr(system, "cuda_driver", lambda: expected)
    [finding] = software.gpu(HERE)
    assert finding.state == state
    assert text in finding.text


def test_no_driver_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert system.cuda_driver("libno-such-driver.so.1") is None
    monkeypatch.setattr(system, "cuda_driver", lambda: None)
    [finding] = software.gpu(HERE)
    assert finding.state == "ok"


def test_a_machine_that_runs_ktk_is_well() -> None:
    result = CliRunner().invoke(app, ["doctor", "--json"])
    document = json.loads(result.output)
    assert result.exit_code == 0, result.output
    assert document["ok"] is True
    subjects = [finding["subject"] for finding in document["findings"]]
    for subject in ("CPU", "workers", "NUMA", "memory", "huge pages", "GPU", "packages"):
        assert subject in subjects
    assert subjects.count("backend") >= 6
    for finding in document["findings"]:
        assert finding["state"] in ("ok", "note", "warning", "problem")
    warned = {one["subject"] for one in document["findings"] if one["state"] == "warning"}
    assert set(document["in_the_way"]) == warned


FOUND = [
    Finding("CPU", "ok", "a fine one"),
    Finding("swap", "warning", "much is in it", "end [others]", "/proc/meminfo: SwapFree 0 kB"),
    Finding("CPU quota", "warning", "pays for 2 of 8 cores", "raise it", "cpu.max: 2 1"),
    Finding("swap", "warning", "again", "again"),
]


def test_each_finding_is_a_line_with_evidence_and_the_last_says_what_binds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert health.show(FOUND, as_json=False)
    assert capsys.readouterr().out.splitlines() == [
        "ok       CPU: a fine one",
        "warning  swap: much is in it (/proc/meminfo: SwapFree 0 kB)",
        "         -> end [others]",
        "warning  CPU quota: pays for 2 of 8 cores (cpu.max: 2 1)",
        "         -> raise it",
        "warning  swap: again",
        "         -> again",
        "in the way: swap, CPU quota",
    ]
    assert not health.show([Finding("CPU", "problem", "none", "buy one")], as_json=False)
    assert "in the way: nothing of all this" in capsys.readouterr().out


def test_a_terminal_of_40_columns_breaks_no_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    health.show(FOUND, as_json=False)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert max(map(len, lines)) <= 40
    assert {word for line in lines for word in line.split()} <= {
        word
        for one in FOUND
        for text in (one.state, f"{one.subject}: {one.text} ({one.evidence})", f"-> {one.advice}")
        for word in text.split()
    } | {"in", "the", "way:", "swap,", "quota"}


def fail(error: BackendError) -> Any:
    def open_backend(info: BackendInfo) -> Any:
        raise error

    return open_backend


def test_a_library_that_is_absent_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine has: one where nothing is wrong but the library is well."""
    real = registry.open_backend
    absent = BackendUnsupported("a long text", brief="needs libfoo", advice="install libfoo")

    def open_backend(info: BackendInfo) -> Any:
        return fail(absent)(info) if info.name == "BLIS" else real(info)

    monkeypatch.setattr(report, "open_backend", open_backend)
    monkeypatch.setattr(health, "CHECKS", (software.backends,))
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 0, result.output
    [finding] = [one for one in json.loads(result.output)["findings"] if "BLIS" in one["text"]]
    assert finding["state"] == "note"
    assert finding["text"] == "BLIS is not used here: needs libfoo"
    assert finding["advice"] == "install libfoo"


def findings(check: Any) -> list[tuple[str, str]]:
    found = list(check(HERE))
    assert all(one.advice for one in found if one.state == "problem"), "a problem without advice"
    return [(one.subject, one.state) for one in found]


def test_a_cpu_without_avx2_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    [finding] = isa.cpu(Machine(detected=[]))
    assert (finding.subject, finding.state) == ("CPU", "problem")
    assert "pass the host CPU" in finding.advice


def test_ktk_isa_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KTK_ISA", "avx2")
    monkeypatch.delenv("KTK_ISA_FORCE", raising=False)
    monkeypatch.delenv("KTK_GUARD", raising=False)
    monkeypatch.setattr(_core, "allowed_isa", lambda: ["avx2"])
    [_, capped] = isa.cpu(Machine(detected=["avx2", "avx512"]))
    assert (capped.subject, capped.state) == ("KTK_ISA", "warning")
    assert capped.text == "keeps ktk from using avx512"
    assert capped.evidence == "KTK_ISA=avx2"


@pytest.mark.parametrize("variable", ["KTK_ISA", "KTK_ISA_FORCE"])
def test_a_slip_in_a_variable_is_the_one_problem(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "mmx")
    problems = [one for one in health.examine() if one.state == "problem"]
    assert [one.subject for one in problems] == [variable]
    assert problems[0].advice == f"unset {variable}, or name one of those"


def test_the_policy_of_prefetching_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KTK_PREFETCH", raising=False)
    monkeypatch.setattr(_core, "prefetch_row", lambda: "zen5")
    [found] = isa.prefetch(HERE)
    assert (found.subject, found.state) == ("prefetch", "ok")
    assert found.text.startswith("policy for this CPU: zen5 (few=")
    monkeypatch.setattr(_core, "prefetch_row", lambda: "default")
    [found] = isa.prefetch(HERE)
    assert found.state == "note"
    assert "tools/bench/prefetch" in found.advice


@pytest.mark.slow
def test_ktk_prefetch_is_noticed() -> None:
    """In processes of their own: it is read once."""
    command = [sys.executable, "-m", "ktk", "doctor", "--json"]

    def doctor(setting: str) -> dict[str, Any]:
        done = subprocess.run(
            command, env=os.environ | {"KTK_PREFETCH": setting}, capture_output=True, check=False
        )
        found = json.loads(done.stdout)["findings"]
        problems = [one["subject"] for one in found if one["state"] == "problem"]
        assert problems == ([] if setting.startswith("zen5") else ["KTK_PREFETCH"])
        [ours] = [one for one in found if one["subject"] == "KTK_PREFETCH"]
        return dict(ours)

    ours = doctor("zen5,few=640:l1")
    assert ours["text"].startswith("zen5,few=640:l1: weights are fetched ahead by few=640:l1,")
    assert ours["state"] == "note"
    ours = doctor("zen9")
    assert ours["text"].startswith("KTK_PREFETCH is 'zen9', and 'zen9' in it is neither a CPU (")
    assert ours["advice"] == "unset it, or write it like one of those"


def test_forced_instructions_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KTK_ISA_FORCE", raising=False)
    assert ("KTK_ISA_FORCE", "note") not in findings(isa.cpu)
    monkeypatch.setenv("KTK_ISA_FORCE", "amx")
    found = findings(isa.cpu)
    assert ("KTK_ISA_FORCE", "note") in found
    assert ("KTK_ISA", "warning") not in found, "nothing is withheld"


def test_broken_missing_and_doubled_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    infos = [
        BackendInfo("BROKEN", "acme", "1.2", "acme.broken"),
        BackendInfo("ELSEWHERE", "ktk", "1.2", "ktk._backends.elsewhere", built=False),
        BackendInfo("TWICE", "acme", "1.2", "acme.twice", rivals=("zeta",)),
    ]

    error = BackendImportError("backend of acme failed [libfoo.so missing]")
    monkeypatch.setattr(software, "providers", lambda: infos)
    monkeypatch.setattr(report, "open_backend", fail(error))
    states = [one.state for one in software.backends(HERE)]
    assert states == ["problem", "note", "problem", "problem", "problem"]
    assert findings(software.backends)[-1] == ("backend", "problem")
    monkeypatch.setattr(health, "CHECKS", (software.backends,))
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "failed [libfoo.so missing]" in result.output


def test_a_check_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(machine: Machine) -> Any:
        raise OSError("no /proc")

    monkeypatch.setattr(health, "CHECKS", (check,))
    [finding] = health.examine()
    assert (finding.state, finding.text) == ("problem", "check fails: OSError: no /proc")
