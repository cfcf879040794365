"""`ktk chat`: replies in turns, kept in a transcript."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from rich.console import Console

from ktk.text import report
from ktk.text.generate import ContextFull, Generator, Sampling
from ktk.text.interrupt import Leave
from ktk.text.load import Loaded
from ktk.text.prompt import as_text, chat_tokens, keep_bytes
from ktk.text.run import write
from ktk.text.transcript import Transcript

HELP = """\
/clear  begin a new conversation
/exit   leave; so does Ctrl-D, and Ctrl-C where nothing is being said
/help   show this
Ctrl-C ends a reply."""
_PROMPT = "> "
# For readline, which must not count what is not seen.
_BOLD_PROMPT = "\001\033[1;32m\002> \001\033[0m\002"


class Chat:
    """A conversation with a model.

    Parameters
    ----------
    loaded
        The model.
    sampling
        How tokens are chosen.
    transcript
        Keeps what is said, and may have an earlier conversation to go on with.
    system
        What the model is told first, in a new conversation.
    """

    def __init__(
        self, loaded: Loaded, sampling: Sampling, transcript: Transcript, system: str | None = None
    ) -> None:
        self._generator = Generator(loaded.model, loaded.tokenizer, sampling)
        self._tokenizer = loaded.tokenizer
        self._transcript = transcript
        self._system = None if system is None else as_text(system, "--system")
        self._console = Console(stderr=True, highlight=False)
        self._loaded = loaded
        # Before the user types anything, say if this model cannot chat.
        chat_tokens(self._tokenizer, [{"role": "user", "content": "?"}])
        self._begin()

    def run(self) -> None:
        """Answer until the user leaves."""
        self._say(report.loaded_line(self._loaded))
        where = self._transcript.path
        self._say(f"/help lists commands; what is said is kept in {where}")
        for text in asked():
            word = text.strip()
            if not word:
                continue
            if word in ("/exit", "/quit"):
                return
            if word == "/help":
                print(HELP)
            elif word == "/clear":
                self._generator.forget()
                self._transcript.clear()
                self._begin()
            elif word.startswith("/") and " " not in word and "/" not in word[1:]:
                print(f"there is no command {word}; /help lists them")
            elif not self._answer(text):
                return

    def _begin(self) -> None:
        if self._system is not None and not self._transcript.messages:
            self._transcript.add({"role": "system", "content": self._system})

    def _answer(self, text: str) -> bool:
        """Say something to the model and print its reply; returns whether the chat goes on."""
        messages = self._transcript.messages
        said = {"role": "user", "content": text}
        try:
            said["content"] = as_text(text)
            tokens = chat_tokens(self._tokenizer, [*messages, said])
            self._transcript.add(said)
            reply = self._generator.reply(tokens, write)
        except Leave:
            print()
            return False
        except ContextFull as error:
            print(f"ktk: {error}; /clear begins a new conversation", file=sys.stderr)
            messages.pop()
            return True
        except ValueError as error:
            # No text, or a template that refuses.
            print(f"ktk: {error}", file=sys.stderr)
            if messages and messages[-1] is said:
                messages.pop()
            return True
        write("\n")
        if not reply.tokens:
            messages.pop()
            self._say("interrupted before the first word; the question is forgotten")
            return True
        self._transcript.add(
            {"role": "assistant", "content": reply.text},
            tokens=reply.tokens,
            finish=reply.finish,
        )
        self._say(report.line(reply))
        return True

    def _say(self, text: str) -> None:
        whole = not self._console.is_terminal
        self._console.print(text, style="dim", markup=False, soft_wrap=whole)


def asked() -> Iterator[str]:
    """Yield what the user types, or the lines of a pipe, until the end or Ctrl-C."""
    keep_bytes()
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    console = Console()
    prompt = _BOLD_PROMPT if console.color_system and not console.no_color else _PROMPT
    if terminal:
        # Gives input() a history and keys to edit with, where Python was built with it.
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401
    while True:
        try:
            yield input(prompt) if terminal else _line()
        except EOFError:
            if terminal:
                print()
            return
        except KeyboardInterrupt:
            print()
            return


def _line() -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")
