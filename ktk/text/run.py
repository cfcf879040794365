"""`ktk run`: one prompt, one reply."""

from __future__ import annotations

import json
import sys

from rich.console import Console

from ktk.text import report
from ktk.text.generate import Generator, Reply, Sampling
from ktk.text.load import Loaded
from ktk.text.prompt import as_text, chat_tokens, has_template, raw_tokens

# A model may say anything, and a terminal would take some of that for commands.
_CONTROLS = dict.fromkeys({*range(0x20), *range(0x7F, 0xA0)} - {ord("\n"), ord("\t")}, "\ufffd")


def run_prompt(
    loaded: Loaded,
    prompt: str,
    sampling: Sampling,
    *,
    system: str | None = None,
    raw: bool = False,
    as_json: bool = False,
) -> Reply:
    """Make one reply: text to stdout as it comes, what it took to stderr.

    Parameters
    ----------
    loaded
        The model.
    prompt, system
        What the user says, and what the model is told before.
    sampling
        How tokens are chosen.
    raw
        Let the model go on with the prompt, without a chat template.
    as_json
        Print one JSON object to stdout instead, when the reply has ended.
    """
    tokenizer = loaded.tokenizer
    system = None if system is None else as_text(system, "--system")
    if raw or not has_template(tokenizer):
        if system is not None:
            raise ValueError(
                "--system needs a chat template, which this model does not have"
                if not raw
                else "--system and --raw exclude each other"
            )
        tokens = raw_tokens(tokenizer, prompt)
    else:
        said = [{"role": "system", "content": system}] if system is not None else []
        tokens = chat_tokens(tokenizer, [*said, {"role": "user", "content": prompt}])
    generator = Generator(loaded.model, tokenizer, sampling)
    reply = generator.reply(tokens, (lambda text: None) if as_json else write)
    if as_json:
        is_unicode = (sys.stdout.encoding or "").lower().startswith("utf")
        document = report.document(loaded, reply)
        print(json.dumps(document, indent=2, ensure_ascii=not is_unicode))
        return reply
    write("\n")
    console = Console(stderr=True, highlight=False)
    for text in (report.line(reply), report.loaded_line(loaded)):
        console.print(text, style="dim", markup=False, soft_wrap=not console.is_terminal)
    return reply


def write(text: str) -> None:
    """Write text to stdout at once."""
    sys.stdout.write(visible(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def visible(text: str) -> str:
    """Return a text without what a terminal would obey."""
    return text.translate(_CONTROLS)
