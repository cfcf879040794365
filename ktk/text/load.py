"""Loads a model and its tokenizer, and says what each token reads of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ktk.pool import default_pool, set_default_threads
from ktk.settings import setting
from ktk.text.place import parts_of


@dataclass(frozen=True)
class Loaded:
    """A model that can make text.

    Attributes
    ----------
    name
        What the user calls it.
    path
        Folder or GGUF file.
    model, tokenizer
        Of transformers.
    backends
        What computes its experts; empty where transformers does.
    threads
        That compute.
    seconds
        That loading took.
    reads
        Bytes that a token reads of each part of the model, as `bytes_per_token` says.
    """

    name: str
    path: Path
    model: Any
    tokenizer: Any
    backends: tuple[str, ...]
    threads: int
    seconds: float
    reads: dict[str, int] = field(default_factory=dict)


def require(package: str, extra: str) -> None:
    """Raise ImportError with the line that installs a package, if it is missing."""
    try:
        found = find_spec(package)
    except ImportError:
        found = None
    if found is None:
        raise ImportError(f"this needs {package}: pip install 'ktk[{extra}]'")


def load_text_model(
    name: str,
    *,
    backend: str | None = None,
    linears: str | None = None,
    head: str | None = None,
    threads: int | None = None,
    source: str | None = None,
) -> Loaded:
    """Load a model, with progress on stderr.

    Parameters
    ----------
    name
        As of `ktk.hub.find_model`.
    backend, linears, head, threads
        What computes experts, dense layers and the output head, and on how many threads. By
        default as `ktk config` says.
    source
        Of packed files: what they were made of, where that is not beside them.

    Raises
    ------
    ImportError
        transformers is not installed.
    CheckpointError
        The model is not here, damaged, or too large.
    BackendError
        The backend cannot be used.
    """
    backend = setting("backend", backend).value
    linears = setting("linears", linears).value
    head = setting("head", head).value
    threads = setting("threads", threads).value
    require("transformers", "run")
    rest, experts = parts_of(name, source)
    import torch
    import transformers

    if threads is not None:
        torch.set_num_threads(threads)
        set_default_threads(threads)
    # Their bars count tensors, and are done before the experts are read.
    logging: Any = transformers.utils.logging
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    from ktk.transformers import bytes_per_token, load, load_tokenizer
    from ktk.transformers.gguf_metadata import read_once
    from ktk.transformers.linears import pack_bf16
    from ktk.transformers.packed import packed_modules

    began = time.perf_counter()
    with read_once():
        tokenizer = load_tokenizer(rest)
        model = load(rest, backend=backend, experts=experts, linears=linears, head=head).eval()
    pack_bf16(model, linears=linears is None, head=head is None)
    seconds = time.perf_counter() - began
    used = dict.fromkeys(packed.moe.backend.name for packed in packed_modules(model).values())
    return Loaded(
        name,
        experts or rest,
        model,
        tokenizer,
        tuple(used),
        default_pool().size,
        seconds,
        bytes_per_token(model),
    )
