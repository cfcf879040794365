"""Every program in examples/ runs as it is."""

from __future__ import annotations

import runpy
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
@pytest.mark.parametrize("model", ["Qwen3-30B-A3B", "Qwen3-30B-A3B-Q4_K_M.gguf"])
def test_generate_takes_a_model_of_ones_own(model: str, workplace: Path) -> None:
    """With a template for chats, and without one."""
    script = ROOT / "examples/generate.py"
    options = ("--model", model, "--backend", "AMXINT8", "--max-tokens", "4")
    done = subprocess.run(
        [sys.executable, str(script), *options], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "4 tokens in" in done.stdout


def refusal(
    script: str,
    options: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> str:
    """Run an example, which must end with status 2; return the sentence."""
    path = ROOT / "examples" / f"{script}.py"
    if "transformers" in path.read_text():
        pytest.importorskip("transformers")
    monkeypatch.setattr(sys, "argv", [path.name, *options.split()])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(path), run_name="__main__")
    assert end.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("script", "options", "says"),
    [
        ("finetune", "--steps 0", "--steps: 0 is less than 1"),
        ("finetune", "--length -1", "--length: -1 is less than 1"),
        ("finetune", "--length 1", "--length of 1 leaves no token"),
        ("finetune", "--data my.txt", "--data needs --model"),
        ("finetune", "--model MODEL", "--model needs --data"),
        ("generate", "--max-tokens 0", "--max-tokens: 0 is less than 1"),
        ("layer", "--tokens 0", "--tokens: 0 is less than 1"),
        ("layer", "--tokens some", "--tokens: invalid count value: 'some'"),
        ("layer", "--experts 2", "--top-k is more than --experts"),
    ],
)
def test_examples_refuse_what_means_nothing(
    script: str,
    options: str,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert says in refusal(script, options, monkeypatch, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("text", ["", "\n\n"])
def test_finetune_refuses_an_empty_text(
    text: str,
    workplace: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("my.txt").write_text(text)
    said = refusal("finetune", "--model MODEL --data my.txt", monkeypatch, capsys)
    assert said.endswith("my.txt has no line of two tokens or more")
