"""What can go wrong, as one small tree of exceptions."""

from __future__ import annotations

import re
import textwrap

from ktk._core import SettingError

__all__ = [
    "BackendConflict",
    "BackendError",
    "BackendImportError",
    "BackendIncompatible",
    "BackendNotFound",
    "BackendUnsupported",
    "CheckpointError",
    "CheckpointFormatError",
    "CheckpointTooLarge",
    "SettingError",
]


class BackendError(RuntimeError):
    """A backend cannot be used; the subclass and the message say why.

    Parameters
    ----------
    message : str
        All that there is to say.
    brief : str, optional
        The reason in some ten words, for one line of a table: ``needs a BLIS library``. By default
        the first clause of the message.
    advice : str, optional
        The one next step that helps; empty where there is none.
    """

    def __init__(self, message: str = "", *, brief: str = "", advice: str = "") -> None:
        super().__init__(message)
        self.brief = brief or textwrap.shorten(_first_clause(message), 80, placeholder=" ...")
        self.advice = advice


class BackendNotFound(BackendError):
    """No installed distribution provides a backend of this name."""


class BackendConflict(BackendError):
    """Several distributions provide a backend of this name."""


class BackendImportError(BackendError):
    """The backend is installed, but importing it or reading its table failed."""


class BackendIncompatible(BackendError):
    """The backend was built for another version of the backend ABI."""


class BackendUnsupported(BackendError):
    """The backend is fine, but this machine lacks an instruction set or a library that it needs."""


class CheckpointError(RuntimeError):
    """A checkpoint is missing something, damaged, or not what its configuration says."""


class CheckpointFormatError(CheckpointError):
    """The checkpoint is fine, but the backend does not take weights in its format."""


class CheckpointTooLarge(CheckpointError):
    """The checkpoint is fine, but takes more memory than is available."""


def _first_clause(text: str) -> str:
    return re.split(r"[.:;,](?:\s|$)", text, maxsplit=1)[0]
