"""Keeps a chat in a file of JSON lines: each message is on the disk before the next one begins."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from ktk.closing import Closing
from ktk.durable import sync_folder
from ktk.errors import CheckpointError
from ktk.text.prompt import Message

_ROLES = ("system", "user", "assistant")


class Transcript(Closing):
    """A file that messages are added to.

    The first line says which model it was, others are messages: role, content, time. A line that a
    crash left incomplete is taken away when the file is gone on with.

    Parameters
    ----------
    path
        New, or an earlier transcript. Folders around it are made.
    model
        Name of the model.

    Attributes
    ----------
    messages : list of dict
        Of the file so far, in the words of a chat template.

    Raises
    ------
    CheckpointError
        The file is no transcript, or cannot be one.
    """

    def __init__(self, path: Path, model: str) -> None:
        self.path = path
        self.messages: list[Message] = []
        self._model = model
        self._file: IO[bytes] | None = None
        if path.exists():
            self._go_on()
        self._check_writable()

    def add(self, message: Message, **more: Any) -> None:
        """Append a message, and bring it to the disk."""
        self.messages.append(message)
        self._add({**message, **more})

    def clear(self) -> None:
        """Begin again: messages so far stay in the file, and no longer count."""
        self.messages.clear()
        self._add({"clear": True})

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _add(self, entry: dict[str, Any]) -> None:
        if self._file is None:
            self._file = self._begun()
        self._write(self._file, entry)

    def _begun(self) -> IO[bytes]:
        """Open the file; it is made when there is something to write."""
        self._check_writable()
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        # What people say is theirs alone.
        file = os.fdopen(os.open(self.path, flags, 0o600), "ab")
        if file.tell() == 0:
            self._write(file, {"model": self._model})
            sync_folder(self.path.parent)
        return file

    def _check_writable(self) -> None:
        """Make the folder, and say what is in the way of the file: before a model is loaded."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if not os.access(self.path if self.path.exists() else self.path.parent, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            raise CheckpointError(
                f"what is said cannot be kept in {self.path}: {error.strerror or error}; "
                "--transcript names another file"
            ) from error

    @staticmethod
    def _write(file: IO[bytes], entry: dict[str, Any]) -> None:
        entry["time"] = datetime.now().astimezone().isoformat(timespec="seconds")
        file.write((json.dumps(entry, ensure_ascii=False) + "\n").encode())
        file.flush()
        os.fsync(file.fileno())

    def _go_on(self) -> None:
        """Read what was said, up to a line that is incomplete."""
        if not self.path.is_file():
            kind = "a folder" if self.path.is_dir() else "no regular file"
            raise CheckpointError(f"{self.path} is {kind}: --transcript names a file")
        end = 0
        for number, line in enumerate(self.path.read_bytes().splitlines(keepends=True), 1):
            if not line.endswith(b"\n"):
                break
            try:
                self._take(json.loads(line))
            except (AttributeError, ValueError, TypeError, KeyError, RecursionError):
                raise CheckpointError(
                    f"{self.path} is no transcript of ktk chat: see its line {number}"
                ) from None
            end += len(line)
        self._drop_unanswered()
        os.truncate(self.path, end)

    def _take(self, entry: dict[str, Any]) -> None:
        if entry.get("clear"):
            self.messages.clear()
        elif "model" not in entry:
            if entry["role"] not in _ROLES or not isinstance(entry["content"], str):
                raise ValueError
            if entry["role"] == "user":
                self._drop_unanswered()
            self.messages.append({"role": entry["role"], "content": entry["content"]})

    def _drop_unanswered(self) -> None:
        """Forget a question whose reply never came: templates want turns."""
        if self.messages and self.messages[-1]["role"] == "user":
            self.messages.pop()


def new_path(model: str) -> Path:
    """Return where a chat with a model is kept if nobody says otherwise: ~/.local/state/ktk."""
    from platformdirs import user_state_path

    called = re.sub(r"[^\w.-]+", "-", model).strip("-.")[-60:] or "model"
    folder = user_state_path("ktk", appauthor=False) / "chats"
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder / f"{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}-{called}.jsonl"
