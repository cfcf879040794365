"""What PEFT sees of experts with an adapter: a module that it switches with its own adapters.

PEFT walks the modules of a model and calls those of its own classes. Of these, the one for modules
that are trained beside adapters, `AuxiliaryTrainingWrapper`, is told of everything, and looks after
its own `requires_grad`; it is added to the class of experts as long as they have an adapter. Not
`BaseTunerLayer`: where PEFT finds one, it takes the model for frozen and freezes nothing.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from typing import Any

import torch

from ktk.sft.merging import can_merge, check_finite, merge_into
from ktk.transformers import adapter
from ktk.transformers.packed import packed_of
from ktk.transformers.swap import add_to_class, take_from_class

# What TRL calls its copy of PEFT's adapters as they were before the training.
_REFERENCE = "ref"
# Set where an adapter was read from files, so that training begins with it.
_READ = "ktk_lora_read"


def join(model: torch.nn.Module, modules: Iterable[Any], *, read: bool = False) -> None:
    """Let PEFT, where it is installed, switch the adapters of these modules of experts.

    They belong to the adapters of PEFT that are active; without any, to the first that will be.

    Parameters
    ----------
    model : torch.nn.Module
        Whose modules they are, maybe wrapped by PEFT.
    modules : iterable of Module
        Each has factors.
    read : bool
        The factors are of files, and not B = 0.
    """
    kind = _kind()
    if kind is None:
        return
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = (one for one in model.modules() if isinstance(one, BaseTunerLayer))
    layer = next(layers, None)
    for module in modules:
        add_to_class(module, kind, last=True)
        module._adapters = set() if layer is None else set(layer.active_adapters)
        module._active_adapter = sorted(module._adapters)
        module._disable_adapters = layer is not None and layer.disable_adapters
        setattr(module, _READ, read)


def was_read(module: Any) -> bool:
    """Tell whether a module's adapter, if there is one, was read from files."""
    return getattr(module, _READ, True)


def take_off(module: Any) -> None:
    """Take the adapter off a module of experts, which is none of PEFT's any more."""
    adapter.remove_lora(module)
    kind = _kind()
    if kind is not None:
        take_from_class(module, kind)


@functools.cache
def _kind() -> type | None:
    """Return the class; None where PEFT is not installed. Importing that takes a second."""
    if find_spec("peft") is None:
        return None
    from peft.utils import AuxiliaryTrainingWrapper

    class PeftExperts(AuxiliaryTrainingWrapper):
        """Added to a class of experts; its constructor is never called.

        Attributes
        ----------
        _adapters
            The adapters of PEFT that the factors belong to.
        _active_adapter
            Those of them that are active.
        _disable_adapters
            Whether PEFT has switched all adapters off.
        """

        # The other one looks for what it wraps.
        __getattr__ = torch.nn.Module.__getattr__

        @property
        def ktk_peft_off(self) -> bool:
            return self._disable_adapters or bool(self._adapters and not self._active_adapter)

        def _get_available_adapters(self) -> set[str]:
            return set(self._adapters)

        def check_set_adapter(self, adapter_name: str | list[str]) -> str | None:
            names = _listed(adapter_name)
            if not self._adapters:
                self._adapters.update(names)
            found = [name for name in names if name in self._adapters]
            if _REFERENCE in names and not found and was_read(self):
                raise ValueError(
                    f"{_REFERENCE!r} is TRL's copy of PEFT's adapters before the training, and has "
                    "none of experts, whose adapter was read from files: give the trainer a "
                    "reference model, which copy.deepcopy(model) makes"
                )
            return found[0] if found else None

        def set_adapter(self, adapter_names: str | list[str], inference_mode: bool = False) -> None:
            self._active_adapter = [
                name for name in _listed(adapter_names) if name in self._adapters
            ]

        def set_requires_grad(
            self, adapter_names: str | Sequence[str], requires_grad: bool = True
        ) -> None:
            lora = adapter.lora_of(self)
            if lora is not None and self._adapters.intersection(_listed(adapter_names)):
                for _, factor in lora.factors():
                    factor.requires_grad_(requires_grad)

        def delete_adapter(self, adapter_name: str, new_active_adapters: Any) -> None:
            if adapter_name not in self._adapters:
                return
            self._adapters.remove(adapter_name)
            if self._adapters:
                self.set_adapter(new_active_adapters or [])
            else:
                take_off(self)

        # Files of PEFT have what is PEFT's; `save_adapter` writes the others.
        def adapter_state_dict(self, *_: Any) -> dict[str, Any]:
            return {}

        def adapter_state_dict_load_map(self, *_: Any) -> dict[str, str]:
            return {}

        def unload_and_optionally_merge_module(
            self, merge: bool, safe_merge: bool, adapter_names: list[str] | None
        ) -> Any:
            # PEFT gives the weight of what was unloaded to what it gets, here the same module.
            self.weight = None
            packed: Any = packed_of(self)
            wanted = self._active_adapter if adapter_names is None else adapter_names
            merge = merge and (not self._adapters or bool(self._adapters.intersection(wanted)))
            if merge and not can_merge(packed):
                warnings.warn(
                    f"{packed.name} is packed for {packed.moe.backend.name}, in codes that sums "
                    "would be rounded to: its adapter stays beside it",
                    stacklevel=2,
                )
                self._adapters = set()
                return self
            if merge:
                if safe_merge:
                    check_finite(self, packed)
                merge_into(self, packed)
            take_off(self)
            return self

    return PeftExperts


def _listed(names: str | Sequence[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)
