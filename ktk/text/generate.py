"""Makes replies, and keeps what was computed for the next one."""

from __future__ import annotations

import contextlib
import copy
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import StopStringCriteria

from ktk.text.graphs import Steps, captures
from ktk.text.interrupt import Interrupt
from ktk.text.stream import Show, Stop, Stream
from ktk.text.threads import FewThreads

# One text that is shown as it is made, behind a prompt whose last token is the template's.
_ONE_TEXT = {"num_beams": 1, "num_return_sequences": 1, "token_healing": False}
# Below, the most likely token is taken, as in vLLM: logits over some 1e-36 would be infinite.
_LEAST_TEMPERATURE = 1e-5


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
        # `Generator` gives each reply the cache of the last one, and transformers takes no kind
        # beside it.
        made.cache_implementation = None
        for name, value in _ONE_TEXT.items():
            if (given := getattr(made, name, None)) not in (None, value):
                warnings.warn(
                    f"the model's generation_config has {name} {given!r}; ktk does not follow that",
                    stacklevel=2,
                )
            setattr(made, name, value)
        if self.temperature is not None or self.top_p is not None:
            made.do_sample = True
        if self.temperature is not None:
            made.temperature = self.temperature
        if self.top_p is not None:
            made.top_p = self.top_p
        # A temperature of 0 is how other programs spell it.
        if self.greedy or (self.temperature is not None and self.temperature < _LEAST_TEMPERATURE):
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
        # `generate` makes the same of stop_strings and a tokenizer, but hands that on to the model.
        words, self._config.stop_strings = self._config.stop_strings, None
        self._words = [StopStringCriteria(tokenizer, words)] if words else []
        self._cache: Any = None
        self._cached: list[int] = []
        # Such a mode guesses several tokens and takes the wrong ones back. It puts the whole prompt
        # in again behind what a cache has, and refuses a static one.
        self._guesses = self._config.get_generation_mode() == "assisted_generation"
        captured = not self._guesses and captures(model)
        self._steps = Steps(model, self._context()) if captured else None
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
        config = copy.copy(self._config)
        config.max_new_tokens = limit
        # What fails or is interrupted in the middle of a token leaves half a cache.
        self.forget()
        with (
            Interrupt(lambda: stream.tokens > 0) as interrupt,
            FewThreads(self.model),
            self._no_other_config(),
            self._steps or contextlib.nullcontext(),
            torch.inference_mode(),
        ):
            try:
                made = self.model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    generation_config=config,
                    streamer=stream,
                    stopping_criteria=[Stop(lambda: interrupt.asked), *self._words],
                    past_key_values=cache,
                    return_dict_in_generate=True,
                )
            except KeyboardInterrupt:
                if stream.tokens:
                    raise
                return self._result(stream, prompt, reused, "interrupted")
        sequence = made.sequences[0].tolist()
        self._keep(made.get("past_key_values"), sequence)
        if interrupt.asked:
            finish = "interrupted"
        else:
            full = limit < int(self._config.max_new_tokens)
            cut = "context" if full else "length"
            finish = "stop" if self._ends(made.sequences) else cut
        return self._result(stream, prompt, reused, finish)

    @contextlib.contextmanager
    def _no_other_config(self) -> Iterator[None]:
        """Keep `generate` from taking what is None from the model's own generation_config.

        The call that guesses tokens within another call would guess in its turn, too.
        """
        own = self.model.generation_config
        self.model.generation_config = type(own)()
        try:
            yield
        finally:
            self.model.generation_config = own

    def _keep(self, cache: Any, sequence: list[int]) -> None:
        """Keep a cache for the next reply, if it has the tokens that it should have."""
        # The last token was made and not put in.
        tokens = sequence[:-1]
        if cache is None or self._guesses or int(cache.get_seq_length()) != len(tokens):
            return
        self._cache, self._cached = cache, tokens

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

    def _ends(self, sequences: torch.Tensor) -> bool:
        """Whether a reply ends with a token or a text that ends replies."""
        ends = self._config.eos_token_id
        if int(sequences[0, -1]) in (ends if isinstance(ends, list) else [ends]):
            return True
        return any(bool(word(sequences, None)) for word in self._words)

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
