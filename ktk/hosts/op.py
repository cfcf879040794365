"""The operator "ktk::moe" of torch: a packed layer that graphs, streams and autograd can have.

Compilers trace it by its shapes and leave it as one node. CPU tensors are computed at once. CUDA
tensors take the way of `KTMoEWrapper`: the stream starts the call and waits for it, so that no
thread of Python does, and graphs can capture it. Tensors elsewhere are copied.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from ktk.hosts.adapters import by_token
from ktk.hosts.numbered import LAYERS, NUMBERS, enter, living, plain_inputs
from ktk.hosts.plain import is_plain
from ktk.hosts.train import train
from ktk.ktmoe.model import ModelState
from ktk.ktmoe.steps import Inputs, Submission, result_on_stream, submit_on_stream
from ktk.ktmoe.streams import is_capturing
from ktk.lora import Adapters
from ktk.moe import MoE


class OpLayer:
    """A layer of experts that "ktk::moe" computes.

    Copies, deep ones too, are the same object: packed weights are changed by none but a host that
    hands over others.

    Parameters
    ----------
    moe : MoE
        The layer, with its experts.
    name : str
        What errors that surface later call it.
    number : int, optional
        A number of its own, that a host which keeps compiled graphs finds it by in later processes.
    compute : callable, optional
        What computes tensors in CPU memory instead of `moe`, with its arguments: a layer whose
        experts are divided over processes, of which `moe` has some.

    Raises
    ------
    RuntimeError
        Another layer has the number, and lives.

    Attributes
    ----------
    number : int
        Stands for the layer among the operator's arguments, as long as this object lives.
    keeps_products : bool
        Whether calls whose gradients torch records keep the products of gate and up: twice the
        intermediate size in bf16 for each token and expert that it names. Without them the backward
        pass computes them again.
    """

    keeps_products = True

    def __init__(
        self,
        moe: MoE,
        name: str = "",
        number: int | None = None,
        compute: Callable[..., Any] | None = None,
    ) -> None:
        self.moe = moe
        self.compute = compute or moe
        self.name = name or "a layer of experts"
        self.number = next(NUMBERS) if number is None else number
        self.mask = torch.zeros(moe.config.num_experts, dtype=torch.bool, device="cpu")
        enter(LAYERS, self.number, self)

    def __call__(
        self,
        hidden: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        lora: Adapters | None = None,
        adapter_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the weighted sum of the chosen experts for each token.

        Gradients flow to hidden states, routing weights and factors of an adapter that all tokens
        have.

        Parameters
        ----------
        hidden : tensor [tokens, hidden_size]
            bf16, f16 or f32, on any device.
        topk_ids : tensor of integers [tokens, k]
        topk_weights : tensor of floats [tokens, k]
        lora : Lora or sequence of Lora, optional
            An adapter for all tokens, or several; factors may be on any device.
        adapter_ids : tensor [tokens], int32 or int64, optional
            Which of several adapters each token has; -1, or any number that is none, for no one.

        Returns
        -------
        tensor [tokens, hidden_size]
            As `hidden`, contiguous.

        Raises
        ------
        RuntimeError
            Experts are divided over processes, and gradients are recorded or there are adapters; or
            a backward pass comes to a call with `adapter_ids`.
        ValueError
            Shapes or dtypes do not go together, adapters are not of this layer's sizes, or nothing
            says which token has which.
        """
        if lora is None and adapter_ids is None and is_plain(hidden) and is_plain(topk_weights):
            return on_cpu(hidden, topk_ids, topk_weights, self.number)
        records = torch.is_grad_enabled()
        recorded = records and (hidden.requires_grad or topk_weights.requires_grad)
        plain = lora is None and adapter_ids is None and not recorded
        if not plain and self.compute is not self.moe:
            raise RuntimeError(
                f"{self.name} is divided over processes, and has no backward pass or adapters "
                "there: compute under torch.no_grad(), or load the model in one process"
            )
        if adapter_ids is None and isinstance(lora, Sequence) and len(lora) == 1:
            lora = lora[0]
        if adapter_ids is not None or isinstance(lora, Sequence):
            return by_token(hidden, topk_ids, topk_weights, lora, adapter_ids, self.number)
        if not plain:
            keep = self.keeps_products and records
            return train(hidden, topk_ids, topk_weights, lora, self.number, keep)
        result: torch.Tensor = torch.ops.ktk.moe(hidden, topk_ids, topk_weights, self.number)
        return result

    def renew(self, finish: Callable[[], MoE]) -> None:
        """Let the next call compute what `finish` returns then.

        For hosts that hand weights over again, and need not say when all of them have come: where
        `finish` raises because some have not, so does the call.
        """

        def compute(*inputs: Any, **options: Any) -> Any:
            self.renewed(finish())
            return self.compute(*inputs, **options)

        self.compute = compute

    def renewed(self, moe: MoE) -> None:
        """Compute with a layer, of the same sizes, from now on.

        Graphs that captured the one before are to be captured again. Their replays write nothing,
        and the next call says so.
        """
        self.moe = self.compute = moe
        _state().captured_calls.pop(self, None)

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
    out = torch.empty(hidden.shape, dtype=hidden.dtype, device="cpu")
    living(LAYERS, layer).compute(*plain_inputs(hidden, topk_ids, topk_weights), out=out)
    return out


def on_stream(
    hidden: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    layer: int,
    stream: int | None = None,
) -> torch.Tensor:
    """Let a CUDA stream, by default torch's current one, start the call and wait for it."""
    known, state = living(LAYERS, layer), _state()
    if known.compute is not known.moe:
        return elsewhere(hidden, topk_ids, topk_weights, layer)
    tensors = hidden.detach(), topk_ids, topk_weights.detach()
    width, top_k = known.moe.config.hidden_size, topk_ids.shape[-1]
    inputs = Inputs.of(*tensors, width, top_k, stream)
    captured = is_capturing(inputs.stream, hidden.device)
    if not captured:
        state.check()
    what = Submission(known.moe._core, known.name, known.mask, 0, False, known)
    result = result_on_stream(submit_on_stream(what, state, inputs, captured, None, None))
    return result.view(hidden.shape)


def elsewhere(
    hidden: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, layer: int
) -> torch.Tensor:
    """Compute tensors of another device on copies in CPU memory."""
    return on_cpu(hidden.cpu(), topk_ids.cpu(), topk_weights.cpu(), layer).to(hidden.device)


@functools.cache
def _state() -> ModelState:
    """Return the buffers between GPUs and workers; layers run in turns, and share them."""
    return ModelState()


_of_parents: list[ModelState] = []


def _after_fork() -> None:
    """Let a child have buffers of its own, and never free its parent's: streams may use them."""
    if _state.cache_info().currsize:
        _of_parents.append(_state())
        _state.cache_clear()


os.register_at_fork(after_in_child=_after_fork)


def _shape(
    hidden: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, layer: int
) -> torch.Tensor:
    return hidden.new_empty(hidden.shape)


def _save(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.layer = inputs[3]
    ctx.known = LAYERS.get(ctx.layer)  # which may be the last that keeps it


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    hidden, topk_ids, topk_weights = ctx.saved_tensors
    nothing = hidden.new_empty(0, dtype=torch.bfloat16, device="cpu")
    dx, dw, _ = torch.ops.ktk.moe_backward(
        grad, hidden, topk_ids, topk_weights, nothing, [], 0, 1.0, ctx.layer
    )
    return dx, None, dw, None


# Not `torch.library.custom_op`, whose wrapper costs more than a token of a small layer.
_library: Any = torch.library.Library("ktk", "DEF")  # type: ignore[no-untyped-call]
_library.define("moe(Tensor hidden, Tensor topk_ids, Tensor topk_weights, int layer) -> Tensor")
_library.impl("moe", on_cpu, "CPU")
_library.impl("moe", on_stream, "CUDA")
_library.impl("moe", elsewhere, "CompositeExplicitAutograd")
torch.library.register_fake("ktk::moe", _shape, lib=_library)
torch.library.register_autograd("ktk::moe", _backward, setup_context=_save, lib=_library)
