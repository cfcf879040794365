"""`--device`: all but the experts on a GPU, and what is said where there is none."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

import pytest
import torch
from terminal import Command

from ktk.errors import SettingError
from ktk.settings import setting
from ktk.text import load
from ktk.text.generate import Generator, Sampling
from ktk.text.graphs import Steps

PROMPT = ("-p", "What is the capital of France?")
GREEDY = ("--greedy", "-n", "24")
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")


@no_gpu
@pytest.mark.parametrize("name", ["cuda", "cuda:3"])
def test_a_gpu_that_is_not_here_is_told(model: Path, command: Command, name: str) -> None:
    done = command("run", str(model), *PROMPT, *GREEDY, "--device", name)
    assert done.returncode == 1
    assert f"flag --device: there is no {name} here" in done.stderr
    assert done.stdout == ""


@no_gpu
def test_the_source_of_the_name_is_told(
    model: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command("config", "device", "cuda:1").returncode == 0
    assert command("config", "device").stdout == "cuda:1\n"
    said = command("run", str(model), *PROMPT).stderr
    assert re.search(r"/config.json: device: there is no cuda:1 here.* device --unset", said)
    monkeypatch.setenv("KTK_DEVICE", "cuda")
    assert "KTK_DEVICE: there is no cuda here" in command("run", str(model), *PROMPT).stderr
    # What the command line says goes before both.
    assert command("run", str(model), *PROMPT, "-n", "1", "--device", "cpu").returncode == 0


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "meta"])
def test_other_names_are_refused(model: Path, command: Command, name: str) -> None:
    done = command("run", str(model), *PROMPT, "--device", name)
    assert done.returncode == 1
    assert f"must be cpu, cuda, or a GPU such as cuda:1, got '{name}'" in done.stderr


@pytest.mark.parametrize("option", ["linears", "head"])
def test_dense_layers_are_in_one_place(
    model: Path, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = functools.partial(load.backend_beside, torch.device("cuda", 0))
    monkeypatch.setattr(load, "found_device", lambda place: torch.device("cuda", 0))
    with pytest.raises(SettingError, match=f"--{option} names what computes on the CPU"):
        load.load_text_model(str(model), **{option: "BF16"})  # type: ignore[arg-type]
    # What is said for all commands holds for those without a GPU.
    monkeypatch.setenv(f"KTK_{option.upper()}", "BF16")
    assert beside(setting(option)) is None
    assert load.backend_beside(torch.device("cpu"), setting(option)) == "BF16"


@gpu
def test_a_reply_is_made_on_a_gpu(model: Path, command: Command) -> None:
    done = command("run", str(model), *PROMPT, *GREEDY, "--device", "cuda", "--json")
    assert done.returncode == 0, done.stderr
    here, there = (
        json.loads(command("run", str(model), *PROMPT, *GREEDY, "--json", *more).stdout)
        for more in ((), ("--device", "cuda"))
    )
    assert (here["device"], there["device"]) == ("cpu", "cuda:0")
    assert there["text"] == json.loads(done.stdout)["text"]
    assert there["tokens"] == here["tokens"]
    # Every byte is read in one place.
    reads, moved = here["bytes_per_token"], there["bytes_per_token"]
    assert moved["experts"] == reads["experts"] > 0
    assert moved["gpu"] == sum(moved.values()) - moved["experts"] > 0
    assert (reads["gpu"], sum(reads.values())) == (0, sum(moved.values()))


@gpu
def test_steps_on_a_gpu_are_captured(model: Path) -> None:
    loaded = load.load_text_model(str(model), device="cuda")
    made, other = (
        Generator(loaded.model, loaded.tokenizer, Sampling(max_tokens=24, greedy=True))
        for _ in range(2)
    )
    other._steps = Steps(loaded.model, capture=lambda step: step)
    for prompt in ([5, 6, 7, 8], [5, 6, 7, 8, 9], [5, 6, 1], list(range(2, 400)) * 4):
        reply, wanted = (one.reply(prompt, lambda text: None) for one in (made, other))
        assert (reply.text, reply.tokens) == (wanted.text, wanted.tokens)
    assert made._steps is not None
    assert made._steps._step._replay is not None


@gpu
def test_a_chat_goes_on_from_a_cache_on_a_gpu(
    model: Path, command: Command, tmp_path: Path
) -> None:
    said = "What is the capital of France?\nAnd of Italy?\n"
    done = command("chat", str(model), *GREEDY, "--device", "cuda", text=said)
    assert done.returncode == 0, done.stderr
    assert " kept)" in done.stderr
    assert "all else on cuda:0" in done.stderr


@gpu
def test_a_whole_model_is_timed_with_a_gpu(model: Path, command: Command) -> None:
    whole = ("--whole", "--tokens", "16", "--rounds", "1", "--device", "cuda", "--json")
    done = command("bench", "--checkpoint", str(model), *whole)
    assert done.returncode == 0, done.stderr
    for line in map(json.loads, done.stdout.splitlines()):
        assert line["device"] == "cuda:0"
        assert 0 < line["experts_share"] < 1
