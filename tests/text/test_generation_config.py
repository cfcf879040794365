"""Replies of models whose generation_config.json asks for more than sampling."""

from __future__ import annotations

import copy
import json
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import text_models
import torch
import transformers
from terminal import Command

from ktk.text.generate import Generator, Reply, Sampling

TOKENS = 12
# The next prompt has to go on with what was said.
FIRST, MORE = list(range(2, 32)), [5, 6, 7]


@pytest.fixture(scope="module")
def whole() -> Any:
    """Return a model in float32, where ties are rare."""
    torch.manual_seed(3)
    return transformers.Qwen3MoeForCausalLM(text_models.config(num_hidden_layers=3)).eval()


@pytest.fixture
def tiny(whole: Any) -> Iterator[Any]:
    """Return the model with a generation_config that a test may change."""
    own = whole.generation_config
    whole.generation_config = copy.deepcopy(own)
    yield whole
    whole.generation_config = own


def generator(model: Any, **asked: Any) -> Generator:
    for name, value in asked.items():
        setattr(model.generation_config, name, value)
    sampling = Sampling(max_tokens=TOKENS, greedy=True)
    return Generator(model, text_models.tokenizer(), sampling)


def say(made: Generator, prompt: list[int]) -> Reply:
    return made.reply(prompt, lambda text: None)


def turns(model: Any, **asked: Any) -> list[tuple[str, int]]:
    """Return text and reused tokens of three turns, each behind what was said before."""
    made, prompt, found = generator(model, **asked), FIRST, []
    stock = model.generate

    def generate(*args: Any, **kwargs: Any) -> Any:
        nonlocal prompt
        done = stock(*args, **kwargs)
        prompt = done.sequences[0].tolist() + MORE
        return done

    for _ in range(3):
        model.generate = generate
        reply = say(made, prompt)
        del model.generate
        found.append((reply.text, reply.reused))
    return found


@pytest.mark.parametrize("asked", [{"prompt_lookup_num_tokens": 3}, {"assistant_early_exit": 1}])
def test_guessed_tokens_change_no_reply(tiny: Any, asked: dict[str, int]) -> None:
    plain = turns(tiny)
    guessed = turns(tiny, **asked)
    assert [text for text, _ in guessed] == [text for text, _ in plain]
    assert [reused for _, reused in guessed] == [0, 0, 0]


def test_a_cache_of_other_tokens_is_not_kept(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, stock = turns(tiny), tiny._sample

    def sample(*args: Any, **kwargs: Any) -> Any:
        done = stock(*args[1:], **kwargs)
        done.past_key_values.crop(-1)
        return done

    monkeypatch.setattr(type(tiny), "_sample", sample)
    assert turns(tiny) == [(text, 0) for text, _ in plain]


@pytest.mark.parametrize("kind", ["dynamic", "static", "offloaded"])
def test_a_kind_of_cache_does_not_end_a_chat(tiny: Any, kind: str) -> None:
    plain = turns(tiny)
    assert all(reused for _, reused in plain[1:])
    assert turns(tiny, cache_implementation=kind) == plain
    assert tiny.generation_config.cache_implementation == kind


@pytest.mark.parametrize("many", [False, True])
def test_a_text_that_ends_replies_is_no_cut(tiny: Any, many: bool) -> None:
    whole = say(generator(tiny), FIRST)
    assert whole.finish == "length"
    word = next(one for one in whole.text[1:] if one.isalpha())
    made = generator(tiny, stop_strings=["nowhere in it", word] if many else word)
    for _ in range(2):
        reply = say(made, FIRST)
        assert reply.finish == "stop"
        assert word in reply.text
        assert whole.text.startswith(reply.text)
        assert reply.tokens < TOKENS
    assert say(generator(tiny, stop_strings=["nowhere in it"]), FIRST).finish == "length"


@pytest.mark.parametrize(
    "asked", [{"num_beams": 3}, {"num_return_sequences": 2}, {"token_healing": True}]
)
def test_what_makes_no_single_text_is_told_and_not_done(tiny: Any, asked: dict[str, Any]) -> None:
    plain = say(generator(tiny), FIRST)
    [(name, value)] = asked.items()
    with pytest.warns(UserWarning, match=f"generation_config has {name} {value}; ktk does not"):
        made = generator(tiny, **asked)
    assert say(made, FIRST).text == plain.text


def test_what_means_nothing_is_not_told(tiny: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generator(tiny, num_beams=1, num_return_sequences=1, token_healing=False)


def test_a_chat_tells_it_once(model: Path, tmp_path: Path, command: Command) -> None:
    folder = shutil.copytree(model, tmp_path / "beams")
    path = folder / "generation_config.json"
    asked = {"num_beams": 3, "stop_strings": ["nowhere in it"], "cache_implementation": "static"}
    path.write_text(json.dumps(json.loads(path.read_text()) | asked))
    with pytest.warns(UserWarning, match="has num_beams 3; ktk does not") as told:
        done = command("chat", str(folder), "--greedy", "-n", "4", text="One?\nTwo?\n")
    assert len(told) == 1
    assert done.returncode == 0, done.stderr
    assert "ktk: " not in done.stderr
    assert done.stderr.count("reply 4 tokens") == 2
