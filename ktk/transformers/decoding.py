"""Makes a step of one token fast, beside the products: what it costs to call many small things."""

from __future__ import annotations

from typing import Any

from ktk.hosts.linear import compute_together
from ktk.transformers.attention import share_keys
from ktk.transformers.decoder_layers import speed_up_layers
from ktk.transformers.dense import KtkLinear, packed_linears
from ktk.transformers.moe_blocks import speed_up_blocks
from ktk.transformers.norms import speed_up_norms
from ktk.transformers.rotary import speed_up_rotary
from ktk.transformers.routers import speed_up_routers
from ktk.transformers.steps import speed_up_attention

#: Names of dense layers side by side that models call with the same input, one after the other.
TOGETHER = (
    ("q_proj", "k_proj", "v_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkvz", "in_proj_ba"),
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
)


def speed_up(model: Any) -> None:
    """Let a model of ktk decode fast: attention and, where dense layers are packed, all beside it.

    Calling it again sees to what has come since.
    """
    share_keys(model)
    if not packed_linears(model):
        return
    speed_up_norms(model)
    speed_up_routers(model)
    speed_up_rotary(model)
    speed_up_attention(model)
    speed_up_blocks(model)
    speed_up_layers(model)
    for module in model.modules():
        for names in TOGETHER:
            found = [getattr(module, name, None) for name in names]
            layers = [one.layer for one in found if isinstance(one, KtkLinear)]
            widths = {layer.linear.in_features for layer in layers}
            if len(layers) > 1 and len(widths) == 1:
                compute_together(layers)
