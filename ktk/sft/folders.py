"""What a folder with an adapter says: its tensors, and what each is multiplied with."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ktk.lora import LARGEST

#: What names of modules begin with in a model that PEFT has wrapped.
PREFIX = "base_model.model."
CONFIG = "adapter_config.json"
PEFT = "adapter_model.safetensors"
KT = "fused_expert_lora.safetensors"
PARAMETERS = "expert_parameters.safetensors"
# Options of PEFT with which an adapter is more than B @ A.
_OTHERS = (
    "use_dora",
    "use_qalora",
    "use_bdlora",
    "lora_bias",
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "layer_replication",
)
# How adapters begin that change the weights they stand beside, unless PEFT converts them.
_CHANGE_WEIGHTS = ("pissa", "olora", "corda", "lora_ga", "loftq")
_MERGE = "let PEFT merge the adapter, and load the merged model"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# Of tensors that are factors of experts, of whichever layout.
_OF_EXPERTS = re.compile(r"(^|\.)experts\.")


class AdapterError(ValueError):
    """The tensors of an adapter are not what the model's experts want."""


def check_free(folder: Path) -> None:
    """Check that a folder has no adapter of layers that are no experts.

    Raises
    ------
    AdapterError
        It has.
    """
    from safetensors import SafetensorError, safe_open

    file = folder / PEFT
    if not file.exists():
        return
    try:
        with safe_open(file, "pt") as tensors:
            others = [name for name in tensors.keys() if not _OF_EXPERTS.search(name)]  # noqa: SIM118
    except SafetensorError:
        return  # there is nothing to lose
    if others:
        raise AdapterError(
            f"{file} has an adapter of other layers ({others[0]}, ...), which would be lost: save "
            "the adapter of experts to a folder of its own"
        )


class Written(Mapping[str, torch.Tensor]):
    """The tensors of a folder by name, without PEFT's prefix.

    Parameters
    ----------
    folder : Path

    Raises
    ------
    FileNotFoundError
        The folder has no adapter.
    AdapterError
        A file cannot be read, or has an adapter that ktk does not compute.
    """

    def __init__(self, folder: Path) -> None:
        files = [folder / name for name in (KT, PEFT, PARAMETERS) if (folder / name).exists()]
        if not files:
            raise FileNotFoundError(f"{folder} has neither {PEFT} nor {KT} nor {PARAMETERS}")
        self.path = folder / CONFIG
        if not self.path.exists():
            raise FileNotFoundError(f"{folder} has no {CONFIG}, which says what alpha is")
        self._config = _read_config(self.path)
        self._files: dict[str, Path] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        for file in files:
            for name, tensor in _read_tensors(file).items():
                key = name.removeprefix(PREFIX)
                self._tensors[key], self._files[key] = tensor, file
        self._taken: set[str] = set()

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def take(self, name: str, *shape: int | None) -> torch.Tensor:
        """Return a tensor that the model uses, of float64 as float32.

        Parameters
        ----------
        name : str
        shape : int or None
            What it has to be; None for any number.

        Raises
        ------
        AdapterError
            It has another shape, or is not of floats.
        """
        found = self._tensors[name]
        if len(found.shape) != len(shape) or any(
            want not in (None, have) for have, want in zip(found.shape, shape, strict=True)
        ):
            wanted = ", ".join("any" if one is None else str(one) for one in shape)
            raise AdapterError(
                f"{self._files[name]}: {name} has shape {list(found.shape)}, and this model's "
                f"experts want [{wanted}]: the adapter is for another model, or damaged"
            )
        self._taken.add(name)
        if found.dtype == torch.float64:
            return found.float()
        if found.dtype not in _FLOATS:
            raise AdapterError(f"{self._files[name]}: {name} is of {found.dtype}, not of floats")
        return found

    def number(self, name: str) -> float:
        """Return the one number that a tensor has, unrounded; float32 holds one of its size."""
        self.take(name)
        number = float(self._tensors[name])
        _check_finite(self._files[name], name, number)
        return number

    def check_not_taken(self, name: str, several: str) -> None:
        """Raise AdapterError if a tensor has been taken for another module."""
        if name in self._taken:
            raise AdapterError(
                f"{self._files[name]}: {name} tells no modules apart, and the model has {several}: "
                'save the adapter with layout="peft" or "parameters"'
            )

    def missing(self, name: str, beside: str) -> AdapterError:
        """Return the error that there is no tensor of a name, where there is another one."""
        return AdapterError(
            f"{self._files[beside]} has {beside}, but {name} is missing: copy the adapter again"
        )

    def check_all_taken(self) -> None:
        """Raise AdapterError if there are factors of experts that no module of the model wanted."""
        left = [key for key in self if _OF_EXPERTS.search(key) and key not in self._taken]
        if left and self._taken:
            raise AdapterError(
                f"{self._files[left[0]]} has {left[0]}, which no experts of this model take: the "
                "adapter is for another model"
            )

    def scale(self, name: str, rank: int) -> float:
        """Return what B @ A of a module, or of one of its tensors, is multiplied with."""
        if not rank:
            raise AdapterError(f"{self.path.parent}: factors of {name} have a rank of 0")
        alpha: float = self._config["lora_alpha"]
        for pattern, other in self._config["alpha_pattern"].items():
            if pattern.match(name):
                alpha = other
                break
        return alpha / (rank**0.5 if self._config.get("use_rslora") else rank)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise AdapterError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise AdapterError(f"{path} is not an object of JSON")
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        raise AdapterError(f"{path}: peft_type is {kind!r}, and ktk computes LORA; {_MERGE}")
    for name in _OTHERS:
        if config.get(name):
            raise AdapterError(f"{path}: {name} is set, which ktk does not compute; {_MERGE}")
    begins = str(config.get("init_lora_weights"))
    if begins.lower().startswith(_CHANGE_WEIGHTS):
        raise AdapterError(
            f"{path}: init_lora_weights is {begins!r}, of an adapter for changed weights: let PEFT "
            "convert it, by save_pretrained(..., path_initial_model_for_weight_conversion=...)"
        )
    if (config.get("bias") or "none") != "none":
        raise AdapterError(
            f"{path}: bias is {config['bias']!r}; biases that were trained are no part of an "
            f"adapter of ktk; {_MERGE}"
        )
    config["lora_alpha"] = _number(path, "lora_alpha", config.get("lora_alpha"))
    config["alpha_pattern"] = _patterns(path, config.get("alpha_pattern") or {})
    return config


def _patterns(path: Path, patterns: Any) -> dict[re.Pattern[str], float]:
    if not isinstance(patterns, dict):
        raise AdapterError(f"{path}: alpha_pattern must be an object, got {patterns!r}")
    found = {}
    for pattern, alpha in patterns.items():
        what = f"alpha_pattern {pattern!r}"
        try:
            # As PEFT looks patterns up: at the end of a name, behind a point or all of it.
            compiled = re.compile(rf"(.*\.)?({pattern})$")
        except re.error as error:
            raise AdapterError(f"{path}: {what} is no regular expression: {error}") from error
        found[compiled] = _number(path, what, alpha)
    return found


def _number(path: Path, name: str, value: Any) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise AdapterError(f"{path}: {name} must be a number, got {value!r}")
    _check_finite(path, name, value)
    return float(value)


def _check_finite(path: Path, name: str, number: float) -> None:
    # A NaN is not within either, and an integer of JSON may be beyond any float.
    if not -LARGEST <= number <= LARGEST:
        raise AdapterError(f"{path}: {name} must be a finite number of float32, got {number!r}")


def _read_tensors(file: Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(file)
    except (SafetensorError, ValueError) as error:
        raise AdapterError(f"{file} cannot be read: {error}; copy it again") from error
