"""Captured steps, with a stand-in for a GPU's graphs: tests/text/test_device.py has these."""

from __future__ import annotations

from typing import Any

import pytest
import text_models
import torch
import transformers
from transformers import CompileConfig

from ktk.text.generate import Generator, Sampling
from ktk.text.graphs import Replay, Step, Steps, captures

WORDS = torch.randint(2, 512, (1200,), generator=torch.Generator().manual_seed(1)).tolist()


class Captures:
    """Counts captures; a replay computes the step again from the tensors it was captured with."""

    def __init__(self, error: Exception | None = None) -> None:
        self.count = self.replays = 0
        self._error = error

    def __call__(self, step: Replay) -> Replay:
        self.count += 1
        if self._error is not None:
            raise self._error

        def replay() -> Any:
            self.replays += 1
            return step()

        return replay


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(3)
    return transformers.Qwen3MoeForCausalLM(text_models.config()).eval()


def generator(model: Any, capture: Captures | None = None) -> Generator:
    made = Generator(model, text_models.tokenizer(), Sampling(max_tokens=12, greedy=True))
    made._config.eos_token_id = 511  # which no reply has, so that all replies are of 12 tokens
    if capture is not None:
        made._steps = Steps(model, text_models.CONTEXT, capture)
        # transformers asks for other steps only on GPUs, and where it is told so for a test.
        made._config.compile_config = CompileConfig()
        made._config.compile_config._compile_all_devices = True
    return made


def replies(made: Generator, prompts: list[list[int]]) -> list[tuple[str, int]]:
    found = [made.reply(prompt, lambda text: None) for prompt in prompts]
    return [(one.text, one.reused) for one in found]


def test_captured_steps_change_no_reply(model: Any) -> None:
    """Longer, another ending, from the beginning, and beyond what the first cache holds."""
    prompts = [WORDS[:30], WORDS[:60], [*WORDS[:50], 7, 8, 9], WORDS[60:90], WORDS, WORDS[:40]]
    capture = Captures()
    got = replies(generator(model, capture), prompts)
    wanted = replies(generator(model), prompts)
    assert [text for text, _ in got] == [text for text, _ in wanted]
    # A cache that has to grow begins anew.
    assert [kept for _, kept in got] == [0, 30, 50, 0, 0, 39]
    # Of a reply the first token is the prompt's. A graph serves a cache from its second step on.
    assert capture.count == 2
    assert capture.replays == 6 * 11 - 2


def test_a_model_is_as_it_was_behind_a_reply(model: Any) -> None:
    before = model.get_compiled_call
    replies(generator(model, Captures()), [WORDS[:9]])
    assert model.get_compiled_call == before


def test_a_step_that_cannot_be_captured_is_computed(model: Any) -> None:
    capture = Captures(RuntimeError("operation not permitted when stream is capturing"))
    prompts = [WORDS[:30], WORDS[:60]]
    got = replies(generator(model, capture), prompts)
    assert got == replies(generator(model), prompts)
    assert (capture.count, capture.replays) == (1, 0)


def test_other_shapes_are_captured_anew() -> None:
    capture = Captures()
    step = Step(lambda x, scale: x * scale, capture)
    for size in (1, 1, 1, 2, 2, 1):
        x = torch.arange(size) + 5
        assert torch.equal(step(x=x, scale=3), x * 3)
    assert (capture.count, capture.replays) == (2, 3)


def test_without_a_gpu_nothing_is_captured(model: Any) -> None:
    assert not captures(model)
