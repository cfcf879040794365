"""Makes tokens of what the user says."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from typing import Any

Message = dict[str, str]


def read_prompt(given: str | None) -> str:
    """Return the prompt of the command line, or what comes through a pipe.

    Raises
    ------
    ValueError
        There is neither, or it is empty or no UTF-8.
    """
    if given is None:
        if sys.stdin is None or sys.stdin.isatty():
            raise ValueError("there is no prompt: give one with -p, or through a pipe")
        keep_bytes()
        given = sys.stdin.read()
    if not given.strip():
        raise ValueError("the prompt is empty: give one with -p, or through a pipe")
    return as_text(given)


def keep_bytes() -> None:
    """Let what is no text come from standard input as well, for `as_text` to say so."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")


def as_text(given: str, what: str = "the prompt") -> str:
    """Return what came from outside as text, whatever encoding Python took it to have.

    Raises
    ------
    ValueError
        It is no UTF-8.
    """
    try:
        # In the locale C, and where bytes are none of the locale's, Python keeps them escaped.
        return given.encode("utf-8", "surrogateescape").decode()
    except UnicodeError:
        raise ValueError(f"{what} is not text in UTF-8: convert it, with iconv for one") from None


def has_template(tokenizer: Any) -> bool:
    """Whether the model was trained to chat, and says how."""
    return bool(getattr(tokenizer, "chat_template", None))


def chat_tokens(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Return the tokens of a conversation whose next turn is the model's.

    Raises
    ------
    ValueError
        The template refuses these messages, or there is none.
    """
    from jinja2 import TemplateError

    if not has_template(tokenizer):
        raise ValueError(
            "this model has no chat template: it goes on with a text and does not answer. "
            "ktk run MODEL -p TEXT does that"
        )
    try:
        made = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=True, return_dict=True
        )
    except (TemplateError, ArithmeticError, LookupError, TypeError) as error:
        raise ValueError(f"the chat template of this model refuses the messages: {error}") from None
    return list(made["input_ids"])


def raw_tokens(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a text that the model is to go on with.

    Raises
    ------
    ValueError
        There are none.
    """
    found = list(tokenizer(text)["input_ids"])
    if not found:
        raise ValueError("the prompt is empty: give one with -p, or through a pipe")
    return found
