"""The operator "ktk::moe" of torch: a packed layer that graphs, streams and autograd can have.

Compilers trace it by its shapes and leave it as one node. CPU tensors are computed at once. CUDA
tensors take the way of `KTMoEWrapper`: the stream starts the call and waits for it, so that no
thread of Python does, and graphs can capture it. Tensors elsewhere are copied.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, NoReturn
from weakref import WeakValueDictionary

import torch

from ktk import _core
from ktk.ktmoe.model import ModelState
from ktk.ktmoe.steps import Inputs, Submission, result_on_stream, submit_on_stream
from ktk.moe import MoE

# Arguments of an operator are tensors and numbers: a layer goes by its number.
_layers: WeakValueDictionary[int, OpLayer] = WeakValueDictionary()
_numbers = itertools.count()
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_IDS = (torch.int64, torch.int32)


class OpLayer:
    """A layer of experts that "ktk::moe" computes.

    Copies, deep ones too, are the same object: packed weights never change.

    Parameters
    ----------
    moe : MoE
        The layer, with its experts.
    name : str
        What errors that surface later call it.

    Attributes
    ----------
    number : int
        Stands for the layer among the operator's arguments, as long as this object lives.
    """

    def __init__(self, moe: MoE, name: str = "") -> None:
        self.moe = moe
        self.name = name or "a layer of experts"
        self.number = next(_numbers)
        self.mask = torch.zeros(moe.config.num_experts, dtype=torch.bool, device="cpu")
        _layers[self.number] = self

    def __call__(
        self, hidden: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of the chosen experts for each token.

        Parameters
        ----------
        hidden : tensor [tokens, hidden_size]
            bf16, f16 or f32, on any device.
        topk_ids : tensor of integers [tokens, k]
        topk_weights : tensor of floats [tokens, k]

        Returns
        -------
        tensor [tokens, hidden_size]
            As `hidden`, contiguous. A gradient that is asked of it raises a RuntimeError.
        """
        result: torch.Tensor = torch.ops.ktk.moe(hidden, topk_ids, topk_weights, self.number)
        return result

    def __copy__(self) -> OpLayer:
        return self

    def __deepcopy__(self, memo: Any) -> OpLayer:
        return self

    def __reduce__(self) -> NoReturn:
        raise unpicklable(self.name)

    def __repr__(self) -> str:
        return repr(self.moe)


def unpicklable(name: str) -> TypeError:
    """Return the error that says why packed experts cannot be pickled, and what to do."""
    return TypeError(
        f"{name} cannot be pickled: its experts lie packed in the memory of this process. Load the "
        "model in each process from its files, which `ktk convert` makes fast"
    )


def on_cpu(
    hidden: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, layer: int
) -> torch.Tensor:
    """Compute CPU tensors on the layer's pool."""
    if hidden.stride(-1) != 1:
        hidden = hidden.contiguous()
    if topk_ids.dtype not in _IDS:
        topk_ids = topk_ids.long()
    if topk_weights.dtype not in _FLOATS:
        topk_weights = topk_weights.float()
    out = torch.empty(hidden.shape, dtype=hidden.dtype)
    _layers[layer].moe(
        hidden.detach(), topk_ids.contiguous(), topk_weights.detach().contiguous(), out=out
    )
    return out


def on_stream(
    hidden: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    layer: int,
    stream: int | None = None,
) -> torch.Tensor:
    """Let a CUDA stream, by default torch's current one, start the call and wait for it."""
    known, state = _layers[layer], _state()
    tensors = hidden.detach(), topk_ids, topk_weights.detach()
    width, top_k = known.moe.config.hidden_size, topk_ids.shape[-1]
    inputs = Inputs.of(*tensors, width, top_k, stream)
    captured = _core.stream_is_capturing(inputs.stream)
    if not captured:
        state.check()
    what = Submission(known.moe._core, known.name, known.mask, None, 0, False)
    return result_on_stream(submit_on_stream(what, state, inputs, captured, None, None))


def elsewhere(
    hidden: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, layer: int
) -> torch.Tensor:
    """Compute tensors of another device on copies in CPU memory."""
    return on_cpu(hidden.cpu(), topk_ids.cpu(), topk_weights.cpu(), layer).to(hidden.device)


@functools.cache
def _state() -> ModelState:
    """Return the buffers between GPUs and workers; layers run in turns, and share them."""
    return ModelState()


def _shape(
    hidden: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, layer: int
) -> torch.Tensor:
    return hidden.new_empty(hidden.shape)


def _backward(ctx: Any, grad: torch.Tensor) -> NoReturn:
    raise RuntimeError(
        "a gradient was asked through experts that ktk has packed, and they have no backward: "
        "compute under torch.no_grad(), or train with a model that was loaded without ktk"
    )


# Not `torch.library.custom_op`, whose wrapper costs more than a token of a small layer.
_library: Any = torch.library.Library("ktk", "DEF")  # type: ignore[no-untyped-call]
_library.define("moe(Tensor hidden, Tensor topk_ids, Tensor topk_weights, int layer) -> Tensor")
_library.impl("moe", on_cpu, "CPU")
_library.impl("moe", on_stream, "CUDA")
_library.impl("moe", elsewhere, "CompositeExplicitAutograd")
torch.library.register_fake("ktk::moe", _shape, lib=_library)
torch.library.register_autograd("ktk::moe", _backward, lib=_library)
