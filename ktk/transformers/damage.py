"""Says which file is to blame where transformers fails over a model."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
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
        if not _makes_none(path, options, error):
            raise
        named = options.get("gguf_file", "config.json")
        source = os.path.join(path, named) if os.path.isdir(path) else path
        raise CheckpointError(f"{source} makes no model: {reason(error)}") from error


def _makes_none(path: str, options: dict[str, Any], error: Exception) -> bool:
    """Say whether making a model without weights ends in an error of this kind, too."""
    auto: Any = transformers.AutoModelForCausalLM
    try:
        config = transformers.AutoConfig.from_pretrained(path, **options)
        with torch.device("meta"):
            auto.from_config(config)
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
