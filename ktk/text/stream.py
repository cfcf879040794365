"""What comes out of `generate`, as it comes: text for people, and the time of every token."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import StoppingCriteria, TextStreamer

Show = Callable[[str], None]


class Stream(TextStreamer):
    """Takes tokens from `generate` and gives whole words on.

    Parameters
    ----------
    tokenizer
        Of the model.
    show
        Called with each part of the text.

    Attributes
    ----------
    tokens : int
        How many were made.
    began, first, last : float
        When this object was made, and when the first and the last token came; seconds.
    text : str
        All of the text.
    """

    def __init__(self, tokenizer: Any, show: Show) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._show = show
        self.tokens = 0
        self.text = ""
        self.began = self.first = self.last = time.perf_counter()

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt, or tokens that follow it."""
        if not self.next_tokens_are_prompt:
            self.last = time.perf_counter()
            if not self.tokens:
                self.first = self.last
            self.tokens += value.numel()
        super().put(value)  # type: ignore[no-untyped-call]

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Give on what will not change any more."""
        if text:
            self.text += text
            self._show(text)


class Stop(StoppingCriteria):
    """Ends a reply behind the token that is being made, so that the cache stays whole."""

    def __init__(self, asked: Callable[[], bool]) -> None:
        self._asked = asked

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """Return whether to end, bool [batch], where the tokens are."""
        return torch.full(
            (len(input_ids),), self._asked(), dtype=torch.bool, device=input_ids.device
        )
