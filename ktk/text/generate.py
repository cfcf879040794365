"""Makes replies, and keeps what was computed for the next one."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ktk.text.graphs import Steps, captures
from ktk.text.interrupt import Interrupt
from ktk.text.stream import Show, Stop, Stream
from ktk.text.threads import FewThreads


class ContextFull(ValueError):
    """A model takes no more tokens than it was given."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; None leaves that to the model's generation_config.

    Attributes
    ----------
    max_tokens
        Of a reply.
    temperature, top_p
        Of sampling.
    greedy
        Always the most likely token.
    seed
        Of random numbers.
    """

    max_tokens: int = 2048
    temperature: float | None = None
    top_p: float | None = None
    greedy: bool = False
    seed: int | None = None

    def config(self, model: Any) -> Any:
        """Return the model's generation_config with these changes."""
        made = copy.deepcopy(model.generation_config)
        made.max_length, made.max_new_tokens = None, self.max_tokens
        if self.temperature is not None or self.top_p is not None:
            made.do_sample = True
        if self.temperature is not None:
            made.temperature = self.temperature
        if self.top_p is not None:
            made.top_p = self.top_p
        # A temperature of 0 is how other programs spell it.
        if self.greedy or self.temperature == 0:
            made.do_sample = False
            made.temperature = made.top_p = made.top_k = made.min_p = None
        return made


@dataclass(frozen=True)
class Reply:
    """What the model said, and how long that took.

    Attributes
    ----------
    text, tokens
        Without the prompt; the token that ends a reply is one of them.
    prompt_tokens, reused
        Of the prompt, and how many of these were computed for an earlier reply.
    prefill_seconds, decode_seconds
        Until the first token, and from there to the last.
    finish
        "stop": the model ended it; "length": `max_tokens` did; "context", which is full, did;
        "interrupted".
    """

    text: str
    tokens: int
    prompt_tokens: int
    reused: int
    prefill_seconds: float
    decode_seconds: float
    finish: str


class Generator:
    """Makes replies of one model, one after the other.

    Parameters
    ----------
    model, tokenizer
        Of transformers.
    sampling
        How tokens are chosen.
    """

    def __init__(self, model: Any, tokenizer: Any, sampling: Sampling) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self._config = sampling.config(model)
        if self._config.eos_token_id is None:
            self._config.eos_token_id = tokenizer.eos_token_id
        if self._config.pad_token_id is None:
            ends = self._config.eos_token_id
            self._config.pad_token_id = ends[0] if isinstance(ends, list) else ends
        self._cache: Any = None
        self._cached: list[int] = []
        self._steps = Steps(model, self._context()) if captures(model) else None
        if sampling.seed is not None:
            torch.manual_seed(sampling.seed)

    def forget(self) -> None:
        """Drop what was computed for earlier replies."""
        self._cache, self._cached = None, []

    def reply(self, tokens: Sequence[int], show: Show) -> Reply:
        """Make a reply.

        Parameters
        ----------
        tokens
            The whole prompt. What earlier replies have in common with its beginning is not computed
            again.
        show
            Called with each part of the text as it comes.

        Returns
        -------
        Reply
            Also where Ctrl-C ended it; a second one raises `Leave`.

        Raises
        ------
        ValueError
            The prompt fills the model's context.
        """
        prompt = list(tokens)
        limit = self._room(len(prompt))
        needed = len(prompt) + limit
        if self._steps is not None and not self._steps.holds(needed):
            self.forget()
        reused = self._reuse(prompt)
        stream = Stream(self.tokenizer, show)
        ids = torch.tensor([prompt], device=self.model.device)
        cache = self._cache if self._steps is None else self._steps.cache(needed, reused)
        # What fails or is interrupted in the middle of a token leaves half a cache.
        self.forget()
        with (
            Interrupt(lambda: stream.tokens > 0) as interrupt,
            FewThreads(self.model),
            self._steps or contextlib.nullcontext(),
            torch.inference_mode(),
        ):
            config = copy.copy(self._config)
            config.max_new_tokens = limit
            # transformers takes a cache or its kind, not both.
            if cache is not None:
                config.cache_implementation = None
            try:
                made = self.model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    generation_config=config,
                    streamer=stream,
                    stopping_criteria=[Stop(lambda: interrupt.asked)],
                    past_key_values=cache,
                    return_dict_in_generate=True,
                )
            except KeyboardInterrupt:
                if stream.tokens:
                    raise
                return self._result(stream, prompt, reused, "interrupted")
        sequence = made.sequences[0].tolist()
        self._cache = made.get("past_key_values")
        # The last token was made and not put in.
        self._cached = sequence[:-1] if self._cache is not None else []
        if interrupt.asked:
            finish = "interrupted"
        else:
            full = limit < int(self._config.max_new_tokens)
            cut = "context" if full else "length"
            finish = "stop" if self._ends(sequence[-1]) else cut
        return self._result(stream, prompt, reused, finish)

    def _room(self, used: int) -> int:
        """Return how many tokens a reply may have."""
        context = self._context()
        wanted = int(self._config.max_new_tokens)
        if context is None:
            return wanted
        if used >= context:
            raise ContextFull(
                f"{used} tokens are too many: the context of this model ends at {context}"
            )
        return min(wanted, context - used)

    def _context(self) -> int | None:
        """Return the most tokens that the model takes, if it says."""
        config = self.model.config.get_text_config(decoder=True)
        context = getattr(config, "max_position_embeddings", None)
        return None if context is None else int(context)

    def _reuse(self, prompt: list[int]) -> int:
        """Cut the cache to what it has in common with a prompt, and return how much that is."""
        same = 0
        for mine, theirs in zip(self._cached, prompt[:-1], strict=False):
            if mine != theirs:
                break
            same += 1
        surplus = len(self._cached) - same
        if surplus:
            try:
                if self._steps is None:
                    self._cache.crop(-surplus)
                else:
                    self._steps.cut(same)
            # Linear attention and sliding windows forget what they would have to go back to.
            except (AttributeError, NotImplementedError, RuntimeError):
                same = 0
        if not same:
            self.forget()
        self._cached = self._cached[:same]
        return same

    def _ends(self, token: int) -> bool:
        ends = self._config.eos_token_id
        return token in (ends if isinstance(ends, list) else [ends])

    @staticmethod
    def _result(stream: Stream, prompt: list[int], reused: int, finish: str) -> Reply:
        return Reply(
            text=stream.text,
            tokens=stream.tokens,
            prompt_tokens=len(prompt),
            reused=reused,
            prefill_seconds=(stream.first if stream.tokens else time.perf_counter()) - stream.began,
            decode_seconds=stream.last - stream.first,
            finish=finish,
        )
