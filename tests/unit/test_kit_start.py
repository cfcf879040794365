"""``python -m ktk.testing`` where something is missing."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ktk

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


@pytest.mark.parametrize("missing", ["pytest", "hypothesis"])
def test_without_its_libraries_the_kit_names_the_extra(missing: str) -> None:
    code = f"""
import runpy, sys
sys.modules[{missing!r}] = None
sys.argv = ["ktk.testing", "BF16"]
runpy.run_module("ktk.testing", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f'the conformance kit needs {missing}: pip install "ktk[kit]"')
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_a_variant_that_no_backend_has_is_refused_with_those_that_there_are() -> None:
    chosen = ("BF16", "FP8")
    variants = list(dict.fromkeys(v.name for b in chosen for v in ktk.load_backend(b).variants))
    command = [sys.executable, "-m", "ktk.testing", *chosen, "--ktk-variant", variants[0]]
    command += ["--ktk-variant", "avx51", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR, done.stdout[-2000:]
    assert f"there is no variant 'avx51'; there are {', '.join(variants)}" in done.stderr


def test_the_extra_has_what_the_kit_imports() -> None:
    (extra,) = re.findall(r"^kit = (\[.*\])$", PYPROJECT.read_text(), re.MULTILINE)
    assert {part.split()[0] for part in ast.literal_eval(extra)} == {"hypothesis", "pytest"}


@pytest.mark.slow
def test_the_kit_knows_nothing_of_checkpoints() -> None:
    """Backends are tested where only arrays are: emulated machines, say."""
    code = "import sys, ktk.testing.plugin; assert 'ktk.checkpoint' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
