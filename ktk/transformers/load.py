"""Loads a whole model: experts by ktk, all else by transformers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from ktk.checkpoint.detect import check_path, is_gguf, is_packed
from ktk.checkpoint.files import read_json
from ktk.checkpoint.open import open_checkpoint
from ktk.checkpoint.packed.folder import read_index
from ktk.conversion.fingerprint import fingerprint
from ktk.errors import CheckpointError
from ktk.hub import find_model
from ktk.transformers.config import METHOD, KtkConfig
from ktk.transformers.damage import naming_damage, reason
from ktk.transformers.gguf_config import config_of
from ktk.transformers.gguf_metadata import read_once

# Options of `from_pretrained` that say where files are.
_HUB = (
    "cache_dir",
    "force_download",
    "local_files_only",
    "proxies",
    "revision",
    "subfolder",
    "token",
)
# Others that stay its own, though a configuration has attributes of these names.
_ITS_OWN = {"attn_implementation", "dtype", "experts_implementation", "quantization_config"}


def load(
    path: str | os.PathLike[str],
    *,
    backend: str | None = None,
    dtype: Any = None,
    experts: str | os.PathLike[str] | None = None,
    linears: str | None = None,
    head: str | None = None,
    **options: Any,
) -> Any:
    """Load a causal language model whose experts ktk computes.

    Parameters
    ----------
    path : path
        A folder with config.json and safetensors files; a GGUF file; a folder that `ktk convert`
        wrote, beside or inside the folder of its source; or the name of a model of the Hugging Face
        hub.
    backend : str, optional
        What computes the experts. By default the format of their weights decides.
    dtype : torch.dtype or str, optional
        Of all other weights. By default as the files have it; of GGUF files, bf16.
    experts : path, optional
        Where the experts are, if not in `path`: a folder that `ktk convert` wrote.
    linears, head : str, optional
        What computes dense layers, and the output head, as in :class:`KtkConfig`.
    **options
        Of `AutoModelForCausalLM.from_pretrained`, such as device_map or attn_implementation.

    Returns
    -------
    PreTrainedModel

    Raises
    ------
    CheckpointError
        Files are missing or damaged, lack a tensor of the model or have one of another shape, or
        memory cannot hold the experts.
    BackendError
        The backend cannot be used here.
    OSError, ValueError
        What transformers says of files and options.
    """
    found = locate(path)
    _check_generation(found, options)
    config = KtkConfig(backend, experts=experts or found.experts, linears=linears, head=head)
    auto: Any = transformers.AutoModelForCausalLM
    return load_whole(
        auto.from_pretrained,
        found.name,
        dtype=dtype or found.dtype,
        experts_implementation=METHOD,
        quantization_config=config,
        **found.options,
        **options,
    )


def load_whole(from_pretrained: Callable[..., Any], name: str, **options: Any) -> Any:
    """Load a model by `from_pretrained`, and refuse it if something of it was not in the files.

    Parameters
    ----------
    from_pretrained : callable
        Of a class of transformers.
    name, **options
        What it is called with; of a GGUF file, it gets the completed configuration.

    Raises
    ------
    CheckpointError
        Files are damaged, lack a tensor of the model or have one of another shape.
    """
    fits = options.pop("ignore_mismatched_sizes", False)
    tells = options.pop("output_loading_info", False)
    gguf_file = options.get("gguf_file")
    where = {key: options[key] for key in ("gguf_file", *_HUB) if options.get(key) is not None}
    with read_once(), naming_damage(name, **where):
        if gguf_file and options.get("config") is None:
            config = options["config"] = config_of(name, **where)
            # As `from_pretrained` does where it makes the configuration itself.
            for key in [key for key in options if key not in _ITS_OWN and hasattr(config, key)]:
                setattr(config, key, options.pop(key))
        model, said = from_pretrained(
            name,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # transformers' error names no tensor
            **options,
        )
    others = () if fits else said["mismatched_keys"]
    _check_whole(name, gguf_file, said["missing_keys"], others)
    return (model, said) if tells else model


def _check_generation(found: Located, options: Mapping[str, Any]) -> None:
    """Refuse a generation_config.json that is none before weights are loaded, not after."""
    if {"generation_config", "subfolder"} & {*options, *found.options}:
        return
    if (generation := Path(found.name, "generation_config.json")).exists():
        read_json(generation)


def _check_whole(
    path: str,
    gguf_file: str | None,
    missing: Iterable[str],
    others: Iterable[tuple[str, Any, Any]],
) -> None:
    """Refuse a model some of whose tensors were not in the files, and are random numbers now."""
    what, cure = "config.json", "one of the files is of another model"
    doubt = "is a file missing, or config.json of another model?"
    if gguf_file:
        path, what = os.path.join(path, gguf_file), "its metadata"
        cure = "are some of it missing?"
        doubt = (
            "is it whole, and of an architecture whose experts transformers knows in GGUF files?"
        )
    for name, stored, wanted in others:
        raise CheckpointError(
            f"{path}: {name} has shape {list(stored)}, and {what} wants {list(wanted)}: {cure}"
        )
    if lacking := sorted(missing):
        more = f" and {len(lacking) - 1} more tensors" if lacking[1:] else ""
        raise CheckpointError(f"{path} lacks {lacking[0]}{more}, which {what} wants: {doubt}")


def load_tokenizer(path: str | os.PathLike[str], **options: Any) -> Any:
    """Load the tokenizer of a model, given what `load` is given.

    Raises
    ------
    CheckpointError
        The folder has none, or one that cannot be read.
    """
    found = locate(path)
    auto: Any = transformers.AutoTokenizer
    try:
        with read_once(), naming_damage(found.name, **found.options):
            made = auto.from_pretrained(found.name, **found.options, **options)
    except json.JSONDecodeError as error:
        raise _no_readable_tokenizer(found.name, error) from error
    except (OSError, ValueError) as error:
        if _may_have_tokenizer(found):
            raise
        raise _no_tokenizer(found.name) from error
    except CheckpointError:
        raise
    except Exception as error:  # tokenizers raises no other kind
        raise _no_readable_tokenizer(found.name, error) from error
    # Of a class whose files are not there, transformers makes one that knows nothing.
    if len(made) <= len(made.all_special_tokens) and not _may_have_tokenizer(found):
        raise _no_tokenizer(found.name)
    return made


def _may_have_tokenizer(found: Located) -> bool:
    patterns = ("*token*", "*.model", "vocab.*", "tekken.json", "*.py")
    if found.options or not os.path.isdir(found.name):
        return True
    return any(any(Path(found.name).glob(pattern)) for pattern in patterns)


def _no_readable_tokenizer(folder: str, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{folder}: its tokenizer cannot be read: {reason(error)}. Is a file damaged, or "
        "of a later version than tokenizers and transformers here?"
    )


def _no_tokenizer(folder: str) -> CheckpointError:
    return CheckpointError(
        f"{folder} has no tokenizer, without which nothing is text: copy tokenizer.json and "
        "tokenizer_config.json there, which the model was published with"
    )


@dataclass(frozen=True)
class Located:
    """Where the parts of a model are.

    Attributes
    ----------
    name
        What transformers loads the model from: a folder, or a name of the hub.
    experts
        A folder with the experts; None if they are where the rest is.
    options
        Further keywords of `from_pretrained`.
    """

    name: str
    experts: str | None
    options: dict[str, Any]

    @property
    def dtype(self) -> Any:
        """What weights are to be where nobody says: as they are, or bf16 for decoded blocks."""
        return torch.bfloat16 if self.options else "auto"


def locate(path: str | os.PathLike[str]) -> Located:
    """Find the parts of a model, given what `load` is given.

    Raises
    ------
    CheckpointError
        The source of packed files is not there.
    """
    name = os.fspath(path)
    experts = name if is_packed(name) else None
    if not os.path.exists(name) and (os.path.isabs(name) or name.startswith((".", "~"))):
        check_path(name)  # which is no name of the hub, and says what is missing
    source = _source(Path(name)) if experts else Path(name)
    if not is_gguf(source):
        return Located(os.fspath(source) if experts else name, experts, {})
    with open_checkpoint(source) as checkpoint:
        first = checkpoint.files()[0]
    return Located(os.fspath(first.parent), experts, {"gguf_file": first.name})


def _source(packed: Path) -> Path:
    """Find the checkpoint that packed files were made of: attention is only there."""
    index = read_index(packed)
    folder = packed.resolve()
    for place in (folder.parent / index.source_name, folder.parent, index.source_name):
        try:
            candidate = find_model(place)
            with open_checkpoint(candidate) as checkpoint:
                if fingerprint(checkpoint.files()) == index.source:
                    return candidate
        except CheckpointError:
            continue
    raise CheckpointError(
        f"{packed} holds experts only, and the checkpoint {index.source_name} that they were made "
        f"of is neither beside it nor where models are: load the checkpoint's folder with "
        f"experts={str(packed)!r}"
    )
