"""KTK_ISA caps what the CPU has, KTK_ISA_FORCE alone adds to it, and a slip in either is said."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import numpy as np
import pytest

import ktk
from ktk import _core

x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="names of x86-64")


@x86
@pytest.mark.parametrize("cap", ["amx", "amx_int8", "amx_bf16", "avx512_fp16", "avx2"])
def test_a_cap_adds_nothing(monkeypatch: pytest.MonkeyPatch, cap: str) -> None:
    monkeypatch.setenv("KTK_ISA", cap)
    assert set(_core.allowed_isa()) <= set(_core.detected_isa())


@x86
def test_a_process_with_a_cap_above_its_cpu_computes() -> None:
    code = """
import numpy as np, ktk
for name in "AMXINT8", "BF16":
    moe = ktk.load_backend(name).moe(
        num_experts=1, num_experts_per_tok=1, hidden_size=64, intermediate_size=64)
    moe.load_expert(0, *[np.eye(64, dtype=np.float32)] * 3)
    moe(np.ones((40, 64), np.float32), np.zeros((40, 1), int), np.ones((40, 1), np.float32))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"KTK_ISA": "amx"}, check=False
    )
    assert done.returncode == 0  # -4 is SIGILL


@x86
def test_forcing_adds_what_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KTK_ISA_FORCE", "amx_int8")
    assert set(_core.allowed_isa()) == set(_core.detected_isa()) | {"amx_int8"}
    monkeypatch.setenv("KTK_ISA", "avx2")
    assert _core.allowed_isa() == ["avx2"]


def test_a_slip_in_how_weights_are_fetched_is_an_error_before_anything_is_computed() -> None:
    code = """
import ktk
try:
    ktk.load_backend("BF16")
except ktk.SettingError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"KTK_PREFETCH": "zen5,few=1:l9"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("KTK_PREFETCH is 'zen5,few=1:l9', and 'few=1:l9' in it is ")


@pytest.mark.parametrize("variable", ["KTK_ISA", "KTK_ISA_FORCE"])
def test_a_slip_is_an_error_of_ktk(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    backend = ktk.load_backend("BF16")
    monkeypatch.setenv(variable, "bogus")
    for use in (
        _core.allowed_isa,
        lambda: ktk.load_backend("BF16"),
        lambda: backend.moe(
            num_experts=1, num_experts_per_tok=1, hidden_size=64, intermediate_size=64
        ),
        lambda: repr(backend),
        lambda: _core.PackedMatrix(backend.core, "", np.zeros((16, 64), np.float32)),
    ):
        with pytest.raises(ktk.SettingError, match=f"^{variable} is 'bogus'; expected "):
            use()
