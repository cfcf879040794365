"""What is kept of earlier replies changes no token, whatever attention a model has."""

from __future__ import annotations

from typing import Any

import pytest
import text_models
import torch
import transformers

from ktk.text.generate import Generator, Sampling

SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "initializer_range": 0.3,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
MODELS = {
    "full": ("Qwen3Moe", {}),
    "linear": ("Qwen3Next", {"linear_num_key_heads": 2, "linear_num_value_heads": 2}),
    "sliding": ("GptOss", {"sliding_window": 16, "num_local_experts": 4}),
}


@pytest.fixture(params=MODELS, scope="module")
def kind(request: pytest.FixtureRequest) -> Any:
    """Return a model of each kind of attention, in float32: ties are rare."""
    name, more = MODELS[request.param]
    torch.manual_seed(3)
    config = getattr(transformers, f"{name}Config")(**SIZES | more)
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


def replies(model: Any, prompts: list[list[int]], *, anew: bool) -> list[tuple[str, int]]:
    generator = Generator(model, text_models.tokenizer(), Sampling(max_tokens=12, greedy=True))
    found = []
    for prompt in prompts:
        if anew:
            generator.forget()
        reply = generator.reply(prompt, lambda text: None)
        found.append((reply.text, reply.reused))
    return found


def test_a_prompt_that_goes_on_changes_nothing(kind: Any) -> None:
    """Longer than a sliding window, another ending, and from the beginning."""
    words = torch.randint(2, 512, (90,), generator=torch.Generator().manual_seed(1)).tolist()
    prompts = [words[:30], words[:60], [*words[:50], 7, 8, 9], words[:40], words[60:]]
    kept, anew = (replies(kind, prompts, anew=anew) for anew in (False, True))
    assert [text for text, _ in kept] == [text for text, _ in anew]
    assert {reused for _, reused in anew} == {0}
    # Nothing is common to the last prompt and the one before.
    assert kept[-1][1] == 0
    full = not any(kept_of not in (None, "full_attention") for kept_of in kinds_of(kind))
    if full:
        assert [reused for _, reused in kept] == [0, 30, 50, 39, 0]


def test_what_was_said_is_not_computed_again(kind: Any) -> None:
    """A conversation: the next prompt is the last one, its reply, and more."""
    generator = Generator(kind, text_models.tokenizer(), Sampling(max_tokens=12, greedy=True))
    words = torch.randint(2, 512, (40,), generator=torch.Generator().manual_seed(2)).tolist()
    first = generator.reply(words, lambda text: None)
    said = list(generator._cached)
    assert len(said) == len(words) + first.tokens - 1
    second = generator.reply([*said, 5, 6, 7], lambda text: None)
    assert second.reused == len(said)
    alone = replies(kind, [[*said, 5, 6, 7]], anew=True)
    assert second.text == alone[0][0]


def kinds_of(model: Any) -> list[str | None]:
    return getattr(model.config, "layer_types", None) or [None]
