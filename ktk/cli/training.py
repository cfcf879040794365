"""What training a model takes of memory, for `ktk inspect --training`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rich.table import Table

from ktk.sizes import size_text
from ktk.terminal import plain_table

#: Bytes beside a trained f32 parameter: its gradient, and two moments of Adam.
_BESIDE = 12


class _Use(Protocol):
    @property
    def nbytes(self) -> int | None: ...


class LayerSizes(Protocol):
    """What is needed of a layer's report of `ktk inspect`."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def gated(self) -> bool: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def num_experts_per_tok(self) -> int: ...
    @property
    def default_backend(self) -> str | None: ...
    @property
    def backends(self) -> Mapping[str, _Use]: ...


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes that fine-tuning the experts of a model takes, without what its other layers take.

    Attributes
    ----------
    rank
        Of the adapter, with factors of all matrices.
    experts
        Packed for the default backend, frozen.
    factors
        Of low rank, in f32.
    optimizer
        Gradients of the factors, and Adam's moments.
    products_per_token
        Of gate, if there is one, and up, in bf16, which all layers keep until their backward pass,
        and rows of the adapter's rank in f32 beside them.
    hidden_per_token
        The bf16 input of all layers, which is what is kept under gradient checkpointing, or with
        ``keep_products=False``.
    """

    rank: int
    experts: int | None
    factors: int
    optimizer: int
    products_per_token: int
    hidden_per_token: int

    def total(self, tokens: int) -> int:
        """Return all of it for so many tokens at a time."""
        per_token = self.products_per_token + self.hidden_per_token
        return (self.experts or 0) + self.factors + self.optimizer + tokens * per_token


def training_memory(layers: Sequence[LayerSizes], rank: int) -> TrainingMemory:
    """Return what fine-tuning layers with an adapter of a rank takes."""
    factors = products = hidden = 0
    experts: int | None = 0
    for layer in layers:
        h, i = layer.hidden_size, layer.intermediate_size
        matrices = 2 + layer.gated
        factors += matrices * layer.num_experts * rank * (h + i) * 4
        products += layer.num_experts_per_tok * (matrices - 1) * (i * 2 + rank * 4)
        hidden += 2 * h
        use = layer.backends.get(layer.default_backend or "")
        known = None if use is None else use.nbytes
        experts = None if experts is None or known is None else experts + known
    moments = factors // 4 * _BESIDE
    return TrainingMemory(rank, experts, factors, moments, products, hidden)


def training_table(memory: TrainingMemory) -> Table:
    """Return the table that `ktk inspect --training` prints."""
    table = plain_table(f"training experts with an adapter of rank {memory.rank}")
    for heading in ("memory", "for"):
        table.add_column(heading, overflow="fold")
    experts = "-" if memory.experts is None else size_text(memory.experts)
    table.add_row(experts, "experts, packed for the default backend and frozen")
    table.add_row(size_text(memory.factors), "factors of low rank, f32")
    table.add_row(size_text(memory.optimizer), "their gradients, and two moments of Adam")
    products = size_text(memory.products_per_token)
    table.add_row(f"{products} a token", "products of gate and up; none with keep_products=False")
    table.add_row(f"{size_text(memory.hidden_per_token)} a token", "inputs of all layers, bf16")
    for tokens in (2048, 8192):
        table.add_row(size_text(memory.total(tokens)), f"all of it, {tokens} tokens at a time")
    return table
