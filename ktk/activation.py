"""The activation functions of experts in torch, for references: the definition, not the speed."""

from __future__ import annotations

import torch


def glu(
    gate: torch.Tensor,
    up: torch.Tensor,
    activation: str,
    limit: float | None = None,
    alpha: float = 1.702,
) -> torch.Tensor:
    """Return the input of the down projection, in the dtype of `gate`.

    Parameters
    ----------
    gate, up : tensor [tokens, intermediate_size]
        What both projections give, biases included.
    activation, limit, alpha
        As the fields of :class:`ktk.MoEConfig`.

    Raises
    ------
    ValueError
        There is no activation function of this name.
    """
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if activation == "silu":
        return torch.nn.functional.silu(gate) * up
    if activation == "swigluoai":
        return gate * torch.sigmoid(alpha * gate) * (up + 1)
    if activation == "gelu_tanh":
        return torch.nn.functional.gelu(gate, approximate="tanh") * up
    raise ValueError(f"the reference does not know the activation {activation!r}")
