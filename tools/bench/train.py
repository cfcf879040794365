"""Times training of one layer of experts, beside the same layer in torch.

    python tools/bench/train.py BF16 AMXINT8 AMXINT4 FP8 --tokens 4096
    python tools/bench/train.py BF16 --torch --tokens 512 --experts 32

Prints for each backend: the forward pass, the forward pass that keeps products, the backward pass
from these and without them, as seconds and GFLOP/s of the products of weights, and what an adapter
of rank 16 adds. With --torch also transformers' experts (grouped_mm, bf16) under autograd.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

import ktk

ROUNDS = 3


def seconds(run: Callable[[], Any]) -> float:
    """Return the shortest of some runs."""
    best = float("inf")
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - begin)
    return best


def draw(options: argparse.Namespace) -> dict[str, torch.Tensor]:
    """Return weights, tokens and their routing."""
    torch.manual_seed(0)
    e, h, i = options.experts, options.hidden, options.intermediate
    weights, ids = torch.softmax(torch.randn(options.tokens, e), -1).topk(options.top_k)
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


def time_ktk(name: str, given: dict[str, torch.Tensor], options: argparse.Namespace) -> None:
    """Print what a backend takes."""
    backend = ktk.load_backend(name)
    moe = backend.moe(
        num_experts=options.experts,
        num_experts_per_tok=options.top_k,
        hidden_size=options.hidden,
        intermediate_size=options.intermediate,
    )
    if any(one.element == "bf16" for one in backend.accepts):
        moe.load(given["gate"], given["up"], given["down"])
    else:
        from ktk.quantize import quantize

        stored = backend.formats[0]
        for expert in range(options.experts):
            parts = (quantize(given[part][expert], stored) for part in ("gate", "up", "down"))
            moe.load_expert(expert, *parts)
    call = (given["x"], given["ids"], given["weights"])
    rows = int(given["ids"].numel())
    flops = 2 * 3 * rows * options.hidden * options.intermediate

    def speed(time: float) -> str:
        return f"{time:6.2f} s {flops / time / 1e9:5.0f} GFLOP/s"

    forward = seconds(lambda: moe(*call))
    keeping = seconds(lambda: moe.forward_train(*call))
    saved = moe.forward_train(*call)[1]
    backward = seconds(lambda: moe.backward(given["grad"], *call, saved=saved))
    again = seconds(lambda: moe.backward(given["grad"], *call))
    lora = adapter(options)
    with_lora = seconds(lambda: moe.forward_train(*call, lora=lora))
    saved = moe.forward_train(*call, lora=lora)[1]
    back = seconds(lambda: moe.backward(given["grad"], *call, saved=saved, lora=lora))
    print(f"{name} ({moe.variant}, {moe.pool.size} threads)")
    print(f"  forward           {speed(forward)}")
    print(f"  forward, keeping  {speed(keeping)}")
    print(f"  backward          {speed(backward)}, {forward / backward:.2f} of the forward's speed")
    print(f"  backward, again   {again:6.2f} s")
    print(
        f"  adapter, rank 16  forward {with_lora:.2f} s ({with_lora / keeping - 1:+.0%}), "
        f"backward {back:.2f} s ({back / backward - 1:+.0%})",
        flush=True,
    )


def time_torch(given: dict[str, torch.Tensor], options: argparse.Namespace) -> None:
    """Print what transformers' experts take."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(
        hidden_size=options.hidden,
        moe_intermediate_size=options.intermediate,
        num_experts=options.experts,
        num_experts_per_tok=options.top_k,
    )
    config._experts_implementation = "grouped_mm"
    module = Qwen3MoeExperts(config).bfloat16().requires_grad_(False)
    module.gate_up_proj.data = torch.cat([given["gate"], given["up"]], 1)
    module.down_proj.data = given["down"]
    x = given["x"].clone().requires_grad_()
    begin = time.perf_counter()
    y = module(x, given["ids"], given["weights"].bfloat16())
    middle = time.perf_counter()
    y.backward(given["grad"])
    end = time.perf_counter()
    print(f"torch: forward {middle - begin:.2f} s, backward {end - middle:.2f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("backends", nargs="+")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=768)
    parser.add_argument("--torch", action="store_true")
    options = parser.parse_args()
    given = draw(options)
    for name in options.backends:
        time_ktk(name, given, options)
    if options.torch:
        time_torch(given, options)


if __name__ == "__main__":
    main()
