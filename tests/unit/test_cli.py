"""The command line says what is there, and what is wrong in one sentence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from typing import Any

import pytest
from typer.testing import CliRunner

from ktk import registry
from ktk.cli import app, report
from ktk.errors import BackendImportError
from ktk.registry import BackendInfo

runner = CliRunner()


def invoke(*arguments: str) -> str:
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result.output


def test_version() -> None:
    assert invoke("--version").strip() == invoke("version").strip() == f"ktk {version('ktk')}"


def test_help_lists_the_commands() -> None:
    text = invoke("--help")
    for command in ("backends", "bench", "demo", "doctor", "inspect", "version"):
        assert command in text


def test_backends_prints_every_backend_and_variant() -> None:
    text = invoke("backends")
    for name in ("BF16", "AMXINT8"):
        assert name in text
        for variant in registry.load_backend(name).variants:
            assert variant.name in text


def test_backends_as_json_says_what_runs_here() -> None:
    document = json.loads(invoke("backends", "--json"))
    found = {entry["name"]: entry for entry in document["backends"]}
    for name in ("BF16", "AMXINT8"):
        entry = found[name]
        assert entry["distribution"] == "ktk"
        assert entry["error"] is None
        default = [variant["name"] for variant in entry["variants"] if variant["default"]]
        assert default == [entry["runs"]]
        runnable = [variant["name"] for variant in entry["variants"] if variant["runnable"]]
        assert entry["runs"] == runnable[0], "the best that can run comes first"
    assert set(document["allowed_isa"]) <= set(document["detected_isa"])


def test_backends_lists_what_other_names_mean() -> None:
    known = registry.aliases()
    assert known["MOE_INT8"] in registry.backends()
    text = invoke("backends")
    for name, backend in known.items():
        assert f"{name} means {backend}: " in text
    document = json.loads(invoke("backends", "--json"))
    assert {entry["name"]: entry["backend"] for entry in document["aliases"]} == known


def run_ktk(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ktk", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )


def test_a_variant_that_cannot_run_has_its_reason() -> None:
    """Capped to AVX2, AVX-512 and AMX are missing on any machine."""
    done = run_ktk("backends", "--json", KTK_ISA="avx2")
    assert done.returncode == 0, done.stderr
    for entry in json.loads(done.stdout)["backends"]:
        if entry["distribution"] != "ktk":
            continue
        assert entry["runs"] == "avx2"
        for variant in entry["variants"]:
            assert variant["runnable"] == (variant["name"] == "avx2")
            assert (variant["reason"] is None) == variant["runnable"]


@pytest.fixture
def broken_and_rival(monkeypatch: pytest.MonkeyPatch) -> None:
    infos = [
        BackendInfo("BROKEN", "acme", "1.2", "acme.broken"),
        BackendInfo("TWICE", "acme", "1.2", "acme.twice", rivals=("zeta",)),
    ]

    def open_backend(info: BackendInfo) -> Any:
        raise BackendImportError(f"backend {info} failed [libfoo.so missing]")

    monkeypatch.setattr(report, "providers", lambda: infos)
    monkeypatch.setattr(report, "open_backend", open_backend)


@pytest.mark.usefixtures("broken_and_rival")
def test_a_broken_plugin_is_a_row_and_not_a_crash() -> None:
    entries = json.loads(invoke("backends", "--json"))["backends"]
    assert [entry["error_kind"] for entry in entries] == ["BackendImportError"] * 2
    assert entries[0]["error"] == "backend BROKEN of acme 1.2 failed [libfoo.so missing]"
    assert entries[1]["rivals"] == ["zeta"]
    text = invoke("backends")
    assert "BackendImportError" in text
    assert "[libfoo.so" in text, "brackets of a message are not markup"


def test_python_m_ktk_is_the_command() -> None:
    done = run_ktk("--version")
    assert (done.returncode, done.stdout.strip()) == (0, f"ktk {version('ktk')}")


def test_a_foreseen_error_is_one_sentence(tmp_path: Any) -> None:
    done = run_ktk("demo", "--checkpoint", str(tmp_path / "nowhere"))
    assert done.returncode == 1
    assert done.stderr.startswith("ktk: ")
    assert "config.json is missing" in done.stderr
    assert "Traceback" not in done.stderr


def test_bench_passes_its_options_on() -> None:
    assert "--json" in invoke("bench", "--help")
