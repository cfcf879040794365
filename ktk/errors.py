"""What can go wrong, as one small tree of exceptions."""

from __future__ import annotations

__all__ = [
    "BackendConflict",
    "BackendError",
    "BackendImportError",
    "BackendIncompatible",
    "BackendNotFound",
    "BackendUnsupported",
    "CheckpointError",
    "CheckpointFormatError",
]


class BackendError(RuntimeError):
    """A backend cannot be used; the subclass and the message say why."""


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
