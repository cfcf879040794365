"""Says which file is to blame where transformers fails over a model."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import safetensors
import torch
import transformers

from ktk.checkpoint.safetensors.index import TensorIndex
from ktk.errors import BackendError, CheckpointError, SettingError

#: Errors that say what is wrong: ktk's, and transformers' of files and options.
_CLEAR = (BackendError, CheckpointError, SettingError, OSError, ValueError, MemoryError)


@contextlib.contextmanager
def naming_damage(path: str, **options: Any) -> Iterator[None]:
    """Name the file that is damaged, or the configuration that makes no model.

    Errors of safetensors name no file, and what a wrong value in config.json leads to is any error
    of Python, from anywhere.

    Parameters
    ----------
    path, **options
        What `from_pretrained` is called with.

    Raises
    ------
    CheckpointError
        In the place of such an error.
    """
    try:
        yield
    except safetensors.SafetensorError as error:
        if os.path.isdir(path):
            with TensorIndex(Path(path)) as index:
                list(index.in_order())  # of all headers
        raise CheckpointError(f"{path} cannot be read: {error}. Download it again") from error
    except _CLEAR:
        raise
    except Exception as error:
        for name, read in (("config.json", _make), ("generation_config.json", _read_generation)):
            if _fails_so(error, read, path, options):
                source = os.path.join(path, name) if os.path.isdir(path) else path
                raise CheckpointError(f"{source} makes no model: {reason(error)}") from error
        raise


def _make(path: str, options: dict[str, Any]) -> None:
    """Make the model without weights."""
    config = transformers.AutoConfig.from_pretrained(path, **options)
    auto: Any = transformers.AutoModelForCausalLM
    with torch.device("meta"):
        auto.from_config(config)


def _read_generation(path: str, _options: dict[str, Any]) -> None:
    if os.path.exists(os.path.join(path, "generation_config.json")):
        transformers.GenerationConfig.from_pretrained(path)


def _fails_so(
    error: Exception, read: Callable[[str, dict[str, Any]], None], *arguments: Any
) -> bool:
    """Say whether a file alone leads to an error of this kind."""
    try:
        read(*arguments)
    except Exception as found:
        return type(found) is type(error)
    return False


def reason(error: Exception) -> str:
    """Return the text of an error in one line, with its kind where that is one of Python's."""
    text = " ".join(str(error).split())
    kind = type(error)
    if kind is Exception or kind.__module__ != "builtins":
        return text
    return f"{kind.__name__}: {text}"  # KeyError: 'x'
