"""Every program in examples/ runs as it is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from blocks import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
#: What makes one short.
OPTIONS = {"finetune": ("--steps", "2"), "generate": ("--max-tokens", "4")}
#: What each one prints at the end, with a number.
SAYS = {
    "finetune": "adapters are in",
    "generate": "4 tokens in",
    "layer": "BF16, ",
    "two_places": "they differ by",
}


@pytest.mark.slow
@pytest.mark.parametrize("script", EXAMPLES, ids=lambda script: script.stem)
def test_examples_run(script: Path, tmp_path: Path) -> None:
    if "transformers" in script.read_text():
        pytest.importorskip("transformers")
    done = subprocess.run(
        [sys.executable, str(script), *OPTIONS.get(script.stem, ())],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert SAYS[script.stem] in done.stdout.splitlines()[-1]


@pytest.mark.slow
def test_generate_takes_a_model_of_ones_own(workplace: Path) -> None:
    script = ROOT / "examples/generate.py"
    options = ("--model", "Qwen3-30B-A3B", "--backend", "AMXINT8", "--max-tokens", "4")
    done = subprocess.run(
        [sys.executable, str(script), *options], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
