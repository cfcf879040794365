"""Loads a model and its tokenizer, and says what each token reads of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktk.checkpoint.detect import is_gguf
from ktk.checkpoint.files import read_json
from ktk.errors import CheckpointError, SettingError
from ktk.pool import default_pool, set_default_threads
from ktk.settings import FILE, Setting, config_file, setting
from ktk.text.place import parts_of

if TYPE_CHECKING:
    import torch


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
    device
        Where all but the experts is computed, such as "cuda:0".
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
    device: str
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


def found_device(place: Setting) -> torch.device:
    """Return the device that a setting names, if it is here."""
    import torch

    device = torch.device(place.value or "cpu")
    if device.type == "cpu":
        return device
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = torch.cuda.current_device() if device.index is None and count else device.index or 0
    if index >= count:
        known = torch.version.cuda or torch.version.hip
        why = f"torch finds {count} GPUs" if known else "this is torch's build for CPUs"
        where, cure = place.source, ""
        if where == FILE:
            where, cure = f"{config_file()}: device", "; ktk config device --unset takes it out"
        raise SettingError(f"{where}: there is no {device} here, {why}{cure}")
    return torch.device(device.type, index)


def backend_beside(device: torch.device, wanted: Setting) -> str | None:
    """Return what is to compute dense layers: nothing of ktk's where they are on a GPU."""
    if device.type == "cpu" or wanted.value is None:
        name: str | None = wanted.value
        return name
    if wanted.source.startswith("flag"):
        raise SettingError(
            f"--{wanted.key.name} names what computes on the CPU, and --device has that on {device}"
        )
    return None


def check_generation(path: Path) -> None:
    """Refuse a generation_config.json that transformers would stumble over after loading.

    Raises
    ------
    CheckpointError
        The file cannot be read, or one of its values is of another type.
    """
    config = read_json(path)
    kinds: dict[str, tuple[Any, str]] = {
        **dict.fromkeys(
            ("temperature", "top_p", "top_k", "min_p", "max_new_tokens"), ((int, float), "a number")
        ),
        **dict.fromkeys(("eos_token_id", "pad_token_id"), (int, "a token's number, or some")),
        "stop_strings": (str, "a text, or some"),
    }
    for key, (kind, wanted) in kinds.items():
        given = config.get(key)
        values = given if isinstance(given, list) and kind in (int, str) else [given]
        if given is not None and not (
            values and all(isinstance(v, kind) and not isinstance(v, bool) for v in values)
        ):
            raise CheckpointError(f"{path} says {key} {given!r}, which should be {wanted}")


def check_files(rest: Path) -> None:
    """Refuse a folder whose configuration transformers would stumble over.

    Raises
    ------
    CheckpointError
        A file is missing, cannot be read, or has a value of another type; or the folder's name is
        no text.
    """
    try:
        str(rest.absolute()).encode()
    except UnicodeError:
        raise CheckpointError(
            f"{str(rest)!a} is no path in UTF-8, and tokenizers open no other: rename the "
            "folder, or give a link to it"
        ) from None
    if rest.is_dir() and not is_gguf(rest):
        read_json(rest / "config.json")  # or a sentence
        if (generation := rest / "generation_config.json").exists():
            check_generation(generation)


def load_text_model(
    name: str,
    *,
    backend: str | None = None,
    linears: str | None = None,
    head: str | None = None,
    device: str | None = None,
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
    device
        "cpu", or a GPU that has all but the experts, such as "cuda". By default as `ktk config`
        says.
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
    SettingError
        The device is not here; or it is a GPU, and dense layers are asked for on the CPU.
    """
    backend = setting("backend", backend).value
    others = setting("linears", linears), setting("head", head)
    threads = setting("threads", threads).value
    place = setting("device", device)
    require("transformers", "run")
    rest, experts = parts_of(name, source)
    check_files(rest)
    import torch
    import transformers

    where = found_device(place)
    linears, head = (backend_beside(where, one) for one in others)
    if threads is not None:
        set_default_threads(threads)
        torch.set_num_threads(threads)
    # Their bars count tensors, and are done before the experts are read.
    logging: Any = transformers.utils.logging
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    from ktk.transformers import bytes_per_token, load, load_tokenizer
    from ktk.transformers.gguf_metadata import read_once
    from ktk.transformers.linears import pack_bf16
    from ktk.transformers.packed import packed_modules

    options = {} if where.type == "cpu" else {"device_map": str(where)}
    began = time.perf_counter()
    with read_once():
        tokenizer = load_tokenizer(rest)
        model = load(
            rest, backend=backend, experts=experts, linears=linears, head=head, **options
        ).eval()
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
        str(where),
        seconds,
        bytes_per_token(model),
    )
