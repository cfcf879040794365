"""tools/soak, for seconds in the place of hours."""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ktk

SOAK = Path(__file__).parents[2] / "tools" / "soak"


@pytest.mark.slow
def test_layers_do_what_they_promise_whatever_is_done_to_them() -> None:
    done = subprocess.run(
        [sys.executable, SOAK, "--steps", "400", "--seed", "3"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("load_while_computing", "deferral", "interrupt", "fork"):
        assert f"'{name}'" in done.stdout


def test_a_bit_that_is_wrong_is_noticed() -> None:
    soak = runpy.run_path(str(SOAK))
    right = np.ones((2, 3), np.float32)
    wrong = right.copy()
    wrong[1, 2] = np.nextafter(np.float32(1), np.float32(2))
    soak["check"](right, [wrong, right], "BF16")
    with pytest.raises(AssertionError, match="BF16: a result of 2 tokens is off by"):
        soak["check"](wrong, [right], "BF16")


def planted(monkeypatch: pytest.MonkeyPatch, call: Any) -> Any:
    """Return a run whose layers are called by something else."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # pytest's process keeps its own
    soak = runpy.run_path(str(SOAK))["Soak"](seed=1)
    monkeypatch.setattr(ktk.MoE, "__call__", call)
    return soak


def test_a_call_that_fails_beside_a_load_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ktk.MoE.__call__

    def call(*args: Any, **named: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("planted")
        return real(*args, **named)

    soak = planted(monkeypatch, call)
    soak.change = lambda *_: time.sleep(0.1)  # as long as a thread takes to begin
    with pytest.raises(RuntimeError, match="planted"):
        soak.load_while_computing()


def test_a_child_that_computes_with_its_parents_layer_is_noticed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    real, parent = ktk.MoE.__call__, os.getpid()

    def call(*args: Any, **named: Any) -> Any:
        try:
            return real(*args, **named)
        except RuntimeError:
            if os.getpid() == parent:
                raise
            return np.zeros_like(args[1])

    soak = planted(monkeypatch, call)
    with pytest.raises(AssertionError, match="a child ended with status"):
        soak.fork()
    assert "a layer of the parent computes" in capfd.readouterr().err
