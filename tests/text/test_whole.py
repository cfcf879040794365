"""`ktk bench --whole`: what it prints, and that the experts' share is what it says."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import text_models
from terminal import Command

from ktk.bench.whole import Stopwatch
from ktk.text.load import load_text_model

TOO_MANY = str(len(os.sched_getaffinity(0)) + 1)
WHOLE = ("--whole", "--tokens", "16,8", "--rounds", "1")


@pytest.mark.slow
def test_prompts_and_single_tokens_are_timed(model: Path, command: Command) -> None:
    done = command("bench", "--checkpoint", str(model), *WHOLE, "--json", "-b", "AMXINT8")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(one["phase"], one["tokens"]) for one in lines] == [
        ("prefill", 16),
        ("prefill", 8),
        ("decode", 1),
    ]
    for one in lines:
        assert one["tokens_per_second"] == pytest.approx(one["tokens"] / one["seconds"])
        assert 0 < one["experts_share"] < 1
        assert one["backends"] == ["AMXINT8"]
        assert one["threads"] == 1
        # What a model in caches reaches is no fraction of the limit of memory.
        assert one["of_limit"] is None or one["of_limit"] <= 1.1
    table = command("bench", "--checkpoint", str(model), *WHOLE).stdout
    for word in ("prefill", "decode", "BF16", "tokens/s"):
        assert word in table


@pytest.mark.slow
def test_dense_layers_and_the_head_have_options(model: Path, command: Command) -> None:
    def reads(*more: str) -> Any:
        done = command("bench", "--checkpoint", str(model), *WHOLE, "--json", *more)
        return json.loads(done.stdout.splitlines()[0])["bytes_per_token"]

    plain = reads()
    codes = reads("--linears", "AMXINT8")
    assert codes["linears"] < 0.7 * plain["linears"]
    assert codes["head"] == plain["head"]
    assert reads("--head", "AMXINT8")["head"] < 0.7 * plain["head"]


def test_the_share_of_experts_is_the_time_inside_them(model: Path) -> None:
    loaded: Any = load_text_model(str(model))
    # Waits in the place of the experts' forward, which hooks are around.
    modules = [layer.mlp.experts for layer in loaded.model.model.layers]
    for module in modules:
        module.register_forward_pre_hook(lambda *_: None)
    watch = Stopwatch(loaded.model)
    for module in modules:
        module.register_forward_hook(lambda *_: time.sleep(0.05), prepend=True)
    ids = text_models.tokenizer()("What is", return_tensors="pt").input_ids
    with watch:
        total, inside = watch.time(lambda: loaded.model(input_ids=ids))
    assert 0.1 <= inside <= total
    assert watch.time(lambda: loaded.model(input_ids=ids))[1] == 0


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("--whole",), "needs --checkpoint"),
        (("--linears", "BF16"), "needs --whole"),
        (("--head", "BF16"), "needs --whole"),
        (("--device", "cpu"), "needs --whole"),
        (("--whole", "--checkpoint", "{model}", "--variant", "avx2"), "--variant"),
        (("--whole", "--checkpoint", "{model}", "--seconds", "1"), "not with --whole"),
        (("--whole", "--checkpoint", "{model}", "--noise", "0"), "not with --whole"),
        (("--whole", "--checkpoint", "{model}", "--rotate", "0"), "not with --whole"),
        (("--whole", "--checkpoint", "{model}", "--threads", TOO_MANY), "threads are more than"),
        (("--whole", "--checkpoint", "{model}", "--tokens", "9000"), "the context of this model"),
    ],
)
def test_what_makes_no_sense_is_refused(
    model: Path, arguments: tuple[str, ...], what: str, command: Command
) -> None:
    done = command("bench", *(text.replace("{model}", str(model)) for text in arguments))
    assert done.returncode in (1, 2)
    assert what in done.stderr


def test_threads_of_the_configuration_are_held_to_the_cpus(
    model: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KTK_THREADS", TOO_MANY)
    done = command("bench", "--checkpoint", str(model), "--whole")
    assert done.returncode == 1
    assert f"{TOO_MANY} threads are more than" in done.stderr
