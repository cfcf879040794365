"""A backend that somebody else wrote, built and installed, and some that nobody should have."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent / "package"
RUST_PACKAGE = Path(__file__).parent / "rust"
PIP = "-m pip install --quiet --no-build-isolation --no-deps --no-index --disable-pip-version-check"


def installed(package: Path, target: Path) -> dict[str, str]:
    """Build and install a package offline, beside the environment of the tests."""
    tools = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = os.environ | {"PATH": tools}
    command = [sys.executable, *PIP.split(), "--target", os.fspath(target), os.fspath(package)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    path = os.pathsep.join([os.fspath(target), os.environ.get("PYTHONPATH", "")]).rstrip(":")
    return env | {"PYTHONPATH": path}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return installed(PACKAGE, tmp_path_factory.mktemp("site"))


def python(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=600, check=False
    )


def test_it_is_listed_without_being_imported(environment: dict[str, str]) -> None:
    code = """
import sys, ktk
info = ktk.backends()["DEMO_F32"]
print(info.distribution, info.version, info.value, "ktk_demo_backend" in sys.modules)
"""
    done = python(environment, "-c", code)
    assert done.stdout.split() == ["ktk-demo-backend", "0.1", "ktk_demo_backend", "False"]


def test_it_computes(environment: dict[str, str]) -> None:
    code = """
import numpy as np, ktk
moe = ktk.load_backend("DEMO_F32").moe(
    num_experts=1, num_experts_per_tok=1, hidden_size=3, intermediate_size=2, activation="silu")
gate = np.array([[[1, 0, 0], [0, 1, 0]]], np.float32)
down = np.ones((1, 3, 2), np.float32)
moe.load(gate, gate, down)
x = np.array([[1, 2, 3]], np.float32)
y = moe(x, np.zeros((1, 1), np.int64), np.ones((1, 1), np.float32))
silu = lambda v: v / (1 + np.exp(-v))
np.testing.assert_allclose(y, np.full((1, 3), silu(1) + 2 * silu(2)), rtol=1e-6)
print("fine")
"""
    done = python(environment, "-c", code)
    assert done.stdout == "fine\n", done.stderr


def test_it_passes_the_kit(environment: dict[str, str]) -> None:
    done = python(environment, "-m", "ktk.testing", "DEMO_F32", "-q", "-p", "no:cacheprovider")
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout
    assert "DEMO_F32-baseline" in python(
        environment, "-m", "ktk.testing", "DEMO_F32", "--collect-only", "-q"
    ).stdout  # fmt: skip


@pytest.mark.parametrize(
    ("name", "error", "parts"),
    [
        ("DEMO_BROKEN", "BackendImportError", ["No module named 'ktk_demo_backend_missing'"]),
        ("DEMO_FUTURE", "BackendIncompatible", ["ABI 2.", "speaks 1."]),
        ("DEMO_HOLLOW", "BackendError", ["DEMO_HOLLOW"]),
        ("BF16", "BackendConflict", ["ktk-demo-backend 0.1", "distribution="]),
    ],
)
def test_a_bad_one_is_named_and_harms_nobody(
    name: str, error: str, parts: list[str], environment: dict[str, str]
) -> None:
    code = f"""
import ktk
try:
    ktk.load_backend({name!r})
except ktk.{error} as error:
    print(error)
print(ktk.load_backend("DEMO_F32").name, ktk.load_backend("BF16", distribution="ktk").name)
"""
    done = python(environment, "-c", code)
    assert done.returncode == 0, done.stderr
    sentence, names = done.stdout.strip().split("\n")[-2:]
    for part in ["ktk-demo-backend 0.1", *parts]:
        assert part in sentence
    assert names == "DEMO_F32 BF16"


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (
            "ktk_demo_backend:future",
            "backend future (ktk_demo_backend:future, not installed) speaks ABI 2.0, this ktk"
            " speaks 1.0; upgrade ktk, or build it with the abi.h of this ktk",
        ),
        (
            "ktk_demo_backend:hollow",
            "backend hollow (ktk_demo_backend:hollow, not installed) failed to load: ValueError:",
        ),
    ],
)
def test_one_that_no_package_announces_is_named_by_its_module(
    value: str, sentence: str, environment: dict[str, str]
) -> None:
    done = python(environment, "-m", "ktk.testing", value)
    assert done.returncode == 4
    assert sentence in done.stderr


def why_no_rust(folder: Path) -> str | None:
    """What is missing to build a package in Rust, and how to get it."""
    packages = "Debian has it in rustc, bindgen and libclang-dev"
    for tool in ("rustc", "bindgen"):
        if shutil.which(tool) is None:
            return f"there is no {tool}; {packages}"
    header = folder / "probe.h"
    header.write_text("#include <stddef.h>\n#include <stdint.h>\n")
    done = subprocess.run(["bindgen", header], capture_output=True, text=True, check=False)
    return f"bindgen finds no libclang with its headers; {packages}" if done.returncode else None


@pytest.mark.slow
def test_one_in_rust_passes_the_kit(tmp_path: Path) -> None:
    if missing := why_no_rust(tmp_path):
        pytest.skip(missing)
    environment = installed(RUST_PACKAGE, tmp_path / "site")
    kit = ("-m", "ktk.testing", "RUST_F32", "-q", "-p", "no:cacheprovider")
    done = python(environment, *kit)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert " passed" in done.stdout
