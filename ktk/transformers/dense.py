"""Modules that stand where a model had dense layers and embeddings whose weights ktk has packed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn

from ktk.hosts.linear import OpLinear
from ktk.hosts.plain import is_plain


class Weight(torch.Tensor):
    """Stands for a weight that is packed: its shape, dtype and device, and nothing to compute with.

    Models and adapters of PEFT ask a layer for the dtype and the device of its weight. Whoever
    reads or writes values is told that there are none.
    """

    owner: str

    @staticmethod
    def __new__(cls, layer: OpLinear, dtype: torch.dtype) -> Weight:
        shape = (layer.linear.out_features, layer.linear.in_features)
        cpu = torch.device("cpu")
        made: Weight = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=cpu)
        made.owner = layer.name
        return made

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return f"<{self.owner}.weight: packed by ktk>"

    def __deepcopy__(self, memo: Any) -> Weight:
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"{self.owner}.weight cannot be pickled: it lies packed in the memory of this process"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        given = [*args, *(kwargs or {}).values()]
        found = next((one for one in given if isinstance(one, cls)), None)
        where = "the weight of this layer" if found is None else found.owner
        raise RuntimeError(
            f"{where}.weight is packed by ktk, and no tensor any more, which {func} would need: "
            "load the model without the options linears and head to compute with it"
        )


class KtkLinear(nn.Linear):
    """A dense layer whose weight is packed, and its bias with it.

    The bias, if any, is still there to be saved, and asks for no gradient: another one would change
    nothing that is computed.
    """

    def __init__(self, layer: OpLinear, dtype: torch.dtype, bias: nn.Parameter | None) -> None:
        nn.Module.__init__(self)
        self.layer = layer
        self.number = layer.number
        self.in_features = layer.linear.in_features
        self.out_features = layer.linear.out_features
        self.weight: Any = Weight(layer, dtype)
        self.register_parameter("bias", bias)
        self._is_hf_initialized = True  # there is nothing to initialise

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the product, of the dtype of the input, or of autocast's."""
        kind = input.device.type
        if kind != "meta" and torch.is_autocast_enabled(kind) and input.dtype != torch.float64:
            input = input.to(torch.get_autocast_dtype(kind))
        if is_plain(input):
            return self.layer(input)
        result: torch.Tensor = torch.ops.ktk.linear(input, self.number, self.out_features)
        return result

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Keep a parameter, frozen: also one that a loader puts in the place of another."""
        if param is not None:
            param.requires_grad_(False)
        super().register_parameter(name, param)

    def extra_repr(self) -> str:
        """Return what printing a model says of the layer."""
        return repr(self.layer)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.weight = _moved(self.layer, self.weight, fn)
        return self


class KtkEmbedding(nn.Embedding):
    """An embedding whose rows are read from a packed weight: of the output head, if it is tied."""

    def __init__(self, layer: OpLinear, dtype: torch.dtype, padding_idx: int | None) -> None:
        nn.Module.__init__(self)
        self.layer = layer
        self.number = layer.number
        self.num_embeddings = layer.linear.out_features
        self.embedding_dim = layer.linear.in_features
        self.padding_idx = padding_idx
        self.max_norm, self.norm_type = None, 2.0
        self.scale_grad_by_freq = self.sparse = False
        self.weight: Any = Weight(layer, dtype)
        self._is_hf_initialized = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return a row for each token, of the dtype that the model's other weights have."""
        result: torch.Tensor = torch.ops.ktk.rows(
            input, self.number, self.embedding_dim, self.weight.dtype
        )
        return result

    def extra_repr(self) -> str:
        """Return what printing a model says of the embedding."""
        return f"rows of {self.layer!r}"

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.weight = _moved(self.layer, self.weight, fn)
        return self


def _moved(layer: OpLinear, weight: Weight, fn: Callable[[torch.Tensor], torch.Tensor]) -> Weight:
    """Return what stands for a weight after `Module.to`: of another dtype, in the same memory."""
    dtype = fn(torch.empty(0, dtype=weight.dtype, device="cpu")).dtype
    return weight if dtype == weight.dtype else Weight(layer, dtype)


def packed_linears(model: nn.Module) -> dict[str, OpLinear]:
    """Return the packed dense layers of a model by name, an output head among them."""
    return {
        name: module.layer
        for name, module in model.named_modules()
        if isinstance(module, KtkLinear)
    }


def unpacked_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights of packed dense layers by the names of tensors.

    Raises
    ------
    ValueError
        They are packed as codes, which are not these tensors.
    """
    # A tied weight is saved once, as what it is tied to.
    owners = {
        module.layer.number: (name, module.layer)
        for kind in (KtkLinear, KtkEmbedding)
        for name, module in model.named_modules()
        if isinstance(module, kind)
    }
    state = {}
    for name, layer in owners.values():
        if layer.dtype is None:
            backend = layer.linear.backend.name
            raise ValueError(
                f"{name} is packed for {backend}, and cannot be saved as a tensor without loss: "
                "keep the checkpoint that the model came from, and load it with the same options"
            )
        state[f"{name}.weight"] = torch.from_numpy(layer.linear.unpack()).to(layer.dtype)
    return state
