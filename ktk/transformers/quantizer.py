"""Takes experts out of what transformers loads, and loads them; saves what can be saved.

Transformers calls a quantizer before and after it reads weights, and when a model is saved. One of
its own, for checkpoints whose other weights are quantised, goes on doing what it does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from transformers.quantizers.auto import register_quantizer
from transformers.quantizers.base import HfQuantizer

from ktk.checkpoint.gguf.reader import GgufCheckpoint
from ktk.checkpoint.open import open_checkpoint
from ktk.checkpoint.safetensors.index import TensorIndex
from ktk.errors import CheckpointError
from ktk.transformers.adapter import has_lora, trained_state
from ktk.transformers.codes import Coded, all_known, on_cpu, plan_codes
from ktk.transformers.config import METHOD, KtkConfig
from ktk.transformers.decoding import speed_up
from ktk.transformers.dense import unpacked_state
from ktk.transformers.division import Division
from ktk.transformers.files import FromFiles, only_experts_in_codes, plan_files
from ktk.transformers.gguf import read_others
from ktk.transformers.layout import BIASES, is_experts
from ktk.transformers.linears import pack_linears
from ktk.transformers.modules import Experts, experts_of, say_once
from ktk.transformers.packed import drop_weights, packed_modules, packed_of
from ktk.transformers.packing import pack_or_leave
from ktk.transformers.ties import drop_tied, named_once, share, tied_experts


@dataclass(frozen=True)
class Loading:
    """The experts of a model that is being loaded.

    Attributes
    ----------
    experts
        All that ktk can compute.
    from_files
        Those that are packed from files; transformers loads the others.
    tied
        Modules whose weights are those of others that are packed from files, with the names of
        these. What else is tied is known when transformers has loaded it: weights that are both in
        the files, and differ, it does not tie.
    coded
        Dense layers that are stored in codes, if ktk sees to them.
    """

    experts: Sequence[Experts]
    from_files: FromFiles | None
    tied: Mapping[str, str]
    coded: Coded | None = None

    @property
    def taken(self) -> list[Experts]:
        """What transformers is not to load."""
        return [] if self.from_files is None else list(self.from_files.layers.values())

    def finish(self, model: Any, config: KtkConfig) -> None:
        """Pack all experts, and dense layers."""
        if self.from_files is not None:
            self.from_files.load(model)
        for one in self.experts:
            if packed_of(one.module) is None:
                pack_or_leave(one, config.backend)
        share(model, {**self.tied, **tied_experts(model)})
        for one in experts_of(model):  # what was not tied after all
            pack_or_leave(one, config.backend)
        if self.coded is not None:
            self.coded.finish(model)
        pack_linears(model, config.linears, config.head)

    def __deepcopy__(self, memo: Any) -> Loading:
        return self  # conversions of tensors, which transformers copies, know their quantizer


class ExpertsQuantizer:
    """What is added to a quantizer of transformers, so that ktk loads and saves experts."""

    ktk: KtkConfig
    quantization_config: Any
    pre_quantized: bool
    _loading: Loading | None = None
    _on_cpu = True  # where all that is not ktk's goes
    in_codes: bool = False  # the experts, which only ktk can load then
    given: Any = None  # tensors that `save_pretrained` is to write, by its caller
    _also: tuple[str, ...] = ()  # what of a module goes beside its weights

    def preprocess_model(self, model: Any, dtype: Any = None, **kwargs: Any) -> None:
        """Take the experts out of a model that has no weights yet."""
        division = Division.of(model)
        self._on_cpu = on_cpu(kwargs.get("device_map"))
        with torch.device("cpu"):  # the model is being made on the device meta
            experts = experts_of(model)
            from_files = plan_files(experts, kwargs.get("checkpoint_files"), self.ktk, division)
        tied = tied_experts(model)
        self._loading = Loading(experts, from_files, {})
        if not any(map(is_experts, model.modules())):
            say_once(
                f"{type(model).__name__} has no experts that ktk can compute: transformers "
                "computes all of it"
            )
        if division is not None:
            division.check(experts, self._loading.taken)
        if taken := self._loading.taken:
            for one in taken:
                drop_weights(one.module, one.name, *(BIASES if division else self._also))
                one.module._is_hf_initialized = True  # there is nothing to initialise
            names = [one.name for one in taken]
            dropped = {name: other for name, other in tied.items() if other in names}
            drop_tied(model, dropped)
            self._loading = replace(self._loading, tied=dropped)
            self._leave_out(model, names)
        every = [
            name for name, one in model.named_modules() if is_experts(one) and name not in tied
        ]
        if every and len(taken) == len(every):
            self._stand_in(model, dtype, **kwargs)
        elif self.in_codes:
            raise CheckpointError(
                f"the experts of {type(model).__name__} are stored in codes, and ktk does not "
                'compute all of them: load the model without experts_implementation="ktk"'
            )
        super().preprocess_model(model, dtype=dtype, **kwargs)  # type: ignore[misc]

    def postprocess_model(self, model: Any, **kwargs: Any) -> None:
        """Load and pack the experts, when the other weights are there."""
        super().postprocess_model(model, **kwargs)  # type: ignore[misc]
        loading, self._loading = self._loading, None
        if loading is not None:
            loading.finish(model, self.ktk)
        attach(model)

    def get_state_dict_and_metadata(self, model: Any) -> tuple[Any, dict[str, Any]]:
        """Return a model's tensors with those of its experts, where they can be told exactly."""
        state, metadata = super().get_state_dict_and_metadata(model)  # type: ignore[misc]
        state = self.given if state is None else state
        packed = named_once(packed_modules(model))
        if getattr(model, "_hf_peft_config_loaded", False):
            return state, metadata  # of adapters
        for one in packed.values():
            if one.dtype is None:
                name = one.moe.backend.name
                if has_lora(model):
                    say_once(
                        f"experts that are packed for {name} are not saved, nor what else is "
                        "frozen: only parameters that are trained are"
                    )
                    return trained_state(model, state), metadata
                raise ValueError(
                    f"the experts of this model are packed for {name}, and cannot be saved as "
                    f"tensors without loss: `ktk convert SOURCE OUTPUT --backend {name}` writes "
                    "packed files of the checkpoint that they came from"
                )
        if has_lora(model):
            say_once(
                "what is saved has adapters of experts that only a training goes on with, and "
                "from_pretrained leaves out: ktk.sft.save_adapter(model, folder) writes them to be "
                "loaded, and ktk.sft.merge(model) puts them into the weights"
            )
        dense = unpacked_state(model)
        if not packed and not dense:
            return state, metadata  # of a model that ktk does not compute
        state = dict(model.state_dict() if state is None else state) | dense
        for name, one in packed.items():
            state |= {f"{name}.{tensor}": value for tensor, value in one.unpacked().items()}
        return state | dict(self.given or {}), metadata

    def _stand_in(
        self,
        model: Any,
        dtype: Any,
        checkpoint_files: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> None:
        """Take the place of a checkpoint's own quantizer, if ktk reads all that is in codes."""
        first = Path((checkpoint_files or [""])[0])
        folder = first.parent
        if first.suffix != ".safetensors":
            return
        if not self.in_codes:
            if isinstance(self, KtkQuantizer) or not self.pre_quantized:
                return  # nothing is in codes
            if not only_experts_in_codes(folder) and not (self._on_cpu and all_known(folder)):
                return
            self.__class__ = KtkQuantizer
            self.quantization_config = self.ktk
        assert self._loading is not None
        with TensorIndex(folder) as index, torch.device("cpu"):
            coded = plan_codes(index, model, self.ktk, dtype or torch.get_default_dtype())
        coded.leave_out(model)
        self._loading = replace(self._loading, coded=coded)

    def _leave_out(self, model: Any, names: Sequence[str]) -> None:
        """Say nothing of tensors that are in the files and not in the model."""
        patterns = {rf"^{re.escape(name)}\.|\.experts\.\d+\." for name in names}
        known = model._keys_to_ignore_on_load_unexpected or ()
        model._keys_to_ignore_on_load_unexpected = {*known, *patterns}
        config = self.quantization_config
        if hasattr(config, "modules_to_not_convert"):
            config.modules_to_not_convert = [*(config.modules_to_not_convert or ()), *names]


class GgufExpertsQuantizer(ExpertsQuantizer):
    """What is added to the quantizer that reads GGUF files."""

    # Transformers has no names for biases of experts in these files, and nobody saves them.
    _also = BIASES

    def get_state_dict(self, checkpoint_file: str, model: Any) -> Any:
        """Return what is to be put into the model: all but its experts."""
        from_files = None if self._loading is None else self._loading.from_files
        checkpoint = None if from_files is None else from_files.checkpoint
        # What it supports, it reads tensor by tensor, and those of experts not at all.
        known = getattr(self, "supported", True)
        if known or checkpoint is None:
            return super().get_state_dict(checkpoint_file, model)  # type: ignore[misc]
        if not isinstance(checkpoint, GgufCheckpoint):  # packed files, of experts alone
            checkpoint = cast("GgufCheckpoint", open_checkpoint(checkpoint_file))
        return read_others(checkpoint, model, self.dtype, self.ktk, in_blocks=self._on_cpu)

    def update_dtype(self, dtype: Any) -> Any:
        """Return what decoded weights are to be: by default bf16."""
        if self.supported:  # type: ignore[attr-defined]
            return super().update_dtype(dtype)  # type: ignore[misc]
        self.dtype = dtype or torch.bfloat16
        return self.dtype

    def postprocess_model(self, model: Any, **kwargs: Any) -> None:
        """Load and pack the experts; the other weights are floats now."""
        super().postprocess_model(model, **kwargs)
        if not self.quantization_config.dequantize and self.supported:  # type: ignore[attr-defined]
            return
        unmark(model)
        model.hf_quantizer = None
        attach(model)


@register_quantizer(METHOD)
class KtkQuantizer(ExpertsQuantizer, HfQuantizer):
    """For models of which only the experts are ktk's."""

    def __init__(self, quantization_config: KtkConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **{**kwargs, "pre_quantized": True})
        self.ktk = quantization_config

    def postprocess_model(self, model: Any, **kwargs: Any) -> None:
        """Load and pack the experts; what is left is a model as any other."""
        super().postprocess_model(model, **kwargs)
        unmark(model)

    def is_serializable(self) -> bool:
        """Whether to ask for the tensors, which is where a model that has none says so."""
        return True

    @property
    def is_compileable(self) -> bool:
        """Whether graphs can have "ktk::moe"."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Whether gradients pass."""
        return True


def with_experts(quantizer: Any, config: KtkConfig) -> Any:
    """Return a quantizer of transformers, or a new one for None, that leaves experts to ktk."""
    if quantizer is None:
        return KtkQuantizer(config)
    if not isinstance(quantizer, ExpertsQuantizer):
        kind, known = type(quantizer), vars(quantizer)
        added = GgufExpertsQuantizer if hasattr(quantizer, "read_header") else ExpertsQuantizer
        quantizer = object.__new__(type(f"Ktk{kind.__name__}", (added, kind), {}))
        vars(quantizer).update(known)
    quantizer.ktk = config
    return quantizer


def attach(model: Any) -> None:
    """Let a model with packed experts call them, decode fast, and be saved."""
    if packed_modules(model):
        model.set_experts_implementation(METHOD)
    speed_up(model)
    before = getattr(model, "hf_quantizer", None)
    model.hf_quantizer = with_experts(before, getattr(before, "ktk", KtkConfig()))


def unmark(model: Any) -> None:
    """Let what transformers forbids to quantised models be done, such as `float()`."""
    model.is_quantized = False
    for owner, name in ((model, "quantization_method"), (model.config, "quantization_config")):
        if hasattr(owner, name):
            delattr(owner, name)
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_is_quantized"):
            del config._is_quantized
