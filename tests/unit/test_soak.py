"""tools/soak, for seconds in the place of hours."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

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
