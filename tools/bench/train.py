"""Times training of one layer of experts, beside the same layer in torch.

    python tools/bench/train.py BF16 AMXINT8 AMXINT4 FP8 --tokens 4096
    python tools/bench/train.py BF16 --torch --tokens 512 --experts 32

Prints for each backend the forward pass, the forward pass that keeps products, the backward pass
from these and without them, and both with an adapter of rank 16: seconds, GFLOP/s of the products
of weights, and the share of what bf16 products reach on this machine, measured in the same turns.
With --torch also transformers' experts (grouped_mm, bf16) under autograd. All that is timed takes
turns, and the shortest counts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

import ktk
from ktk import _probe
from ktk.bench.limits import LimitProbe, variant_units
from ktk.names import PREFERRED

# Experts of the same values, which are packed apart: drawing and quantizing all takes minutes.
DISTINCT = 4
PEAK = "peak of bf16 products"


class Turns:
    """The shortest times of some functions that are called in turn."""

    def __init__(self) -> None:
        self.runs: dict[str, Callable[[], Any]] = {}
        self.best: dict[str, float] = {}

    def add(self, name: str, run: Callable[[], Any]) -> None:
        self.runs[name] = run

    def take(self, rounds: int) -> None:
        for _ in range(rounds):
            for name, run in self.runs.items():
                begin = time.perf_counter()
                run()
                took = time.perf_counter() - begin
                self.best[name] = min(took, self.best.get(name, took))


def draw(options: argparse.Namespace) -> dict[str, torch.Tensor]:
    """Return the weights of some experts, tokens and their routing."""
    torch.manual_seed(0)
    e, h, i = min(DISTINCT, options.experts), options.hidden, options.intermediate
    choices = torch.randn(options.tokens, options.experts)
    weights, ids = torch.softmax(choices, -1).topk(options.top_k)
    return {
        "gate": (torch.randn(e, i, h) / h**0.5).bfloat16(),
        "up": (torch.randn(e, i, h) / h**0.5).bfloat16(),
        "down": (torch.randn(e, h, i) / i**0.5).bfloat16(),
        "x": torch.randn(options.tokens, h).bfloat16(),
        "grad": torch.randn(options.tokens, h).bfloat16(),
        "ids": ids,
        "weights": weights,
    }


def adapter(options: argparse.Namespace, rank: int = 16) -> ktk.Lora:
    """Return an adapter of all three matrices."""
    e, h, i = options.experts, options.hidden, options.intermediate
    shapes = {"gate": (i, h), "up": (i, h), "down": (h, i)}
    factors = {}
    for part, (rows, columns) in shapes.items():
        factors[f"{part}_a"] = torch.randn(e, rank, columns) / columns**0.5
        factors[f"{part}_b"] = torch.randn(e, rows, rank) / 100
    return ktk.Lora(**factors, scale=2.0)


def pack(name: str, given: dict[str, torch.Tensor], options: argparse.Namespace) -> ktk.MoE:
    """Return a layer of a backend."""
    backend = ktk.load_backend(name)
    moe = backend.moe(
        num_experts=options.experts,
        num_experts_per_tok=options.top_k,
        hidden_size=options.hidden,
        intermediate_size=options.intermediate,
    )
    experts: list[Any] = list(zip(given["gate"], given["up"], given["down"], strict=True))
    if not any(one.element == "bf16" for one in backend.accepts):
        from ktk.quantize import quantize

        stored = backend.formats[0]
        experts = [tuple(quantize(one, stored) for one in parts) for parts in experts]
    for expert in range(options.experts):
        moe.load_expert(expert, *experts[expert % len(experts)])
    return moe


def add_ktk(
    turns: Turns, moe: ktk.MoE, name: str, given: dict[str, torch.Tensor], lora: ktk.Lora
) -> None:
    """Have a layer's passes timed."""
    call = (given["x"], given["ids"], given["weights"])
    grad = given["grad"]
    saved = moe.forward_train(*call)[1]
    beside = moe.forward_train(*call, lora=lora)[1]
    turns.add(f"{name}: forward", lambda: moe(*call))
    turns.add(f"{name}: forward, keeping", lambda: moe.forward_train(*call))
    turns.add(f"{name}: backward", lambda: moe.backward(grad, *call, saved=saved))
    turns.add(f"{name}: backward, again", lambda: moe.backward(grad, *call))
    turns.add(f"{name}: rank 16, forward", lambda: moe.forward_train(*call, lora=lora))
    turns.add(
        f"{name}: rank 16, backward",
        lambda: moe.backward(grad, *call, saved=beside, lora=lora),
    )


def add_torch(turns: Turns, given: dict[str, torch.Tensor], options: argparse.Namespace) -> None:
    """Have the passes of transformers' experts timed."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(
        hidden_size=options.hidden,
        moe_intermediate_size=options.intermediate,
        num_experts=options.experts,
        num_experts_per_tok=options.top_k,
    )
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        module = Qwen3MoeExperts(config).bfloat16().requires_grad_(False)
    of = torch.arange(options.experts) % len(given["gate"])
    gate_up = torch.cat([given["gate"], given["up"]], 1)
    module.gate_up_proj = torch.nn.Parameter(gate_up[of], requires_grad=False)
    module.down_proj = torch.nn.Parameter(given["down"][of], requires_grad=False)
    x = given["x"].clone().requires_grad_()
    weights = given["weights"].bfloat16()
    made: list[torch.Tensor] = []
    turns.add("torch: forward", lambda: made.append(module(x, given["ids"], weights)))
    turns.add("torch: backward", lambda: made.pop().backward(given["grad"]))


def report(turns: Turns, threads: int, options: argparse.Namespace, peak: float) -> None:
    best = turns.best
    rows = options.tokens * options.top_k
    flops = 2 * 3 * rows * options.hidden * options.intermediate
    print(f"{threads} threads, {peak / 1e9:.0f} GFLOP/s of bf16 products measured")
    for name, took in best.items():
        if name != PEAK:
            rate = flops / took
            print(f"{name:30} {took:7.3f} s {rate / 1e9:6.0f} GFLOP/s {rate / peak:5.0%}")
    for name in options.backends:
        forward, keeping, backward = (
            best[f"{name}: {of}"] for of in ("forward", "forward, keeping", "backward")
        )
        more = [
            best[f"{name}: rank 16, forward"] / keeping - 1,
            best[f"{name}: rank 16, backward"] / backward - 1,
        ]
        print(
            f"{name}: backward at {forward / backward:.2f} of the forward's rate; rank 16 adds "
            f"{more[0]:.1%} forward, {more[1]:.1%} backward"
        )
        for other in ("torch", options.backends[0]):
            if other != name and f"{other}: backward" in best:
                ratios = [
                    best[f"{other}: {of}"] / best[f"{name}: {of}"] for of in ("forward", "backward")
                ]
                print(f"{name}: {ratios[0]:.2f} and {ratios[1]:.2f} times the rate of {other}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("backends", nargs="+")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=768)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--torch", action="store_true")
    options = parser.parse_args()
    given = draw(options)
    lora = adapter(options)
    turns = Turns()
    layers = {name: pack(name, given, options) for name in options.backends}
    for name, moe in layers.items():
        add_ktk(turns, moe, name, given, lora)
    if options.torch:
        add_torch(turns, given, options)
    threads = next(iter(layers.values())).pool.size
    probe = LimitProbe(threads)
    peaks: list[float] = []
    variants = ktk.load_backend(PREFERRED["bf16"][0]).variants
    units = {unit for variant in variants for unit in variant_units(variant)} & set(_probe.units())
    unit = max(sorted(units), key=lambda unit: probe.peak(unit, 0.05))
    turns.add(PEAK, lambda: peaks.append(probe.peak(unit, 0.1)))
    turns.take(options.rounds)
    report(turns, threads, options, max(peaks))


if __name__ == "__main__":
    main()
