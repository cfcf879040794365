"""Classes of experts that transformers lets nobody else compute, and ktk does.

Transformers marks the classes whose forward it dispatches, with `use_experts_implementation`, and
says of their modules where weights are. These it does not mark. They get what marked ones have, and
a forward that calls what ktk packed; all else that they do, and models that ktk has not packed,
stay as they are: another implementation that transformers would choose does not know them.
"""

from __future__ import annotations

import functools
import sys
from operator import attrgetter
from typing import Any

from ktk.transformers.adapter import active_lora
from ktk.transformers.layout import FLAGS, is_experts
from ktk.transformers.packed import Packed, packed_of

# By module and class: what the class is made with, by the names of marked ones. LongCat-Flash's has
# the rows of its zero experts in gate_up_proj, which nobody reads.
_CLASSES = {
    (
        "transformers.models.longcat_flash.modeling_longcat_flash",
        "LongcatFlashExperts",
    ): {"num_experts": "num_routed_experts"},
}
_FLAGS = {**dict.fromkeys(FLAGS, False), "has_gate": True, "is_concatenated": True}


def mark() -> None:
    """Mark the classes whose modules are imported, once; those that transformers marks are left."""
    for (module, name), names in _CLASSES.items():
        kind = getattr(sys.modules.get(module), name, None)
        if kind is not None and not is_experts(kind) and not hasattr(kind, "_apply_gate"):
            _mark(kind, names)


def _mark(kind: Any, names: dict[str, str]) -> None:
    made, stock = kind.__init__, kind.forward

    @functools.wraps(made)
    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        made(self, config, *args, **kwargs)
        self.config = config

    @functools.wraps(stock)
    def forward(
        self: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any, *more: Any
    ) -> Any:
        packed = packed_of(self)
        if isinstance(packed, Packed):
            return packed(hidden_states, top_k_index, top_k_weights, active_lora(self))
        return stock(self, hidden_states, top_k_index, top_k_weights, *more)

    for flag, value in _FLAGS.items():
        setattr(kind, flag, value)
    for attribute, known in names.items():
        setattr(kind, attribute, property(attrgetter(known)))
    kind._apply_gate = _apply_gate
    kind.__init__, kind.forward = __init__, forward


def _apply_gate(self: Any, joined: Any) -> Any:
    gate, up = joined.chunk(2, dim=-1)
    return self.act_fn(gate) * up
