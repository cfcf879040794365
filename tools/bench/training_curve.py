"""Trains adapters of a model's experts with ktk and with torch, and compares the losses.

    python tools/bench/training_curve.py FOLDER --json curve.jsonl --plot docs/training.svg

The model has 8 layers of 64 experts [768, 2048] and random weights; FOLDER takes 5 GB. ktk trains
beside experts that are packed for AMXINT8. Torch trains beside bf16 experts of the values that
these codes mean, as transformers computes them, with the same initial adapter and the same batches.
Each runs in a process of its own, one after the other; a third run has other initial factors, which
tells how far curves are apart that mean the same. --json has a line for each: losses, seconds, peak
memory. Where others use the CPUs, OMP_NUM_THREADS=1 spares torch waiting for its own threads.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Self

import torch

SIZES: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 2048,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "vocab_size": 128,
}
BACKEND = "AMXINT8"
RUNS = {"ktk": 0, "torch": 0, "torch, other factors": 1}  # and the seed of their factors
FACTORS = "fused_expert_lora.safetensors"


def make_model(folder: Path) -> None:
    """Write the model's checkpoint."""
    import transformers

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    config = transformers.Qwen3MoeConfig(**SIZES)
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder)
    torch.set_default_dtype(torch.float32)


def load(folder: Path, experts: str, **options: Any) -> Any:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, experts_implementation=experts, **options
    )
    return model.requires_grad_(False).train()


def batches(options: argparse.Namespace) -> torch.Tensor:
    """Return sequences that count in steps of one to three, [steps, batch, length]."""
    generator = torch.Generator().manual_seed(1)
    shape = (options.steps, options.batch, 1)
    start = torch.randint(0, 128, shape, generator=generator)
    stride = torch.randint(1, 4, shape, generator=generator)
    return (start + stride * torch.arange(options.length)) % 128


def ktk_model(options: argparse.Namespace, seed: int) -> tuple[Any, list[Any], int]:
    """Return a model of packed experts, its factors, and the bytes of what is packed."""
    import ktk.sft
    import ktk.transformers
    from ktk.transformers.packed import packed_modules

    model = load(options.folder, "ktk", quantization_config=ktk.transformers.KtkConfig(BACKEND))
    packed = [one.moe for one in packed_modules(model).values()]
    torch.manual_seed(seed)
    factors = ktk.sft.add_lora(model, rank=options.rank, alpha=2 * options.rank)
    ktk.sft.save_adapter(model, options.folder / "adapter", layout="kt")
    return model, factors, sum(one.nbytes for one in packed)


def torch_model(options: argparse.Namespace, seed: int) -> tuple[Any, list[Any], int]:
    """Return a model of bf16 experts that has the values of ktk's codes, and the same adapter."""
    from safetensors.torch import load_file

    import ktk

    model = load(options.folder, "eager")
    state = load_file(options.folder / "adapter" / FACTORS)
    generator = torch.Generator().manual_seed(seed)
    factors: list[torch.nn.Parameter] = []
    held = 0
    for index, layer in enumerate(model.model.layers):
        experts = layer.mlp.experts
        gate, up = experts.gate_up_proj.data.chunk(2, dim=1)
        moe = ktk.load_backend(BACKEND).moe(
            num_experts=len(gate),
            num_experts_per_tok=SIZES["num_experts_per_tok"],
            hidden_size=gate.shape[2],
            intermediate_size=gate.shape[1],
        )
        moe.load(gate.contiguous(), up.contiguous(), experts.down_proj.data)
        for expert in range(len(gate)):
            values = map(torch.from_numpy, moe.unpack_expert(expert))
            for to, value in zip((gate, up, experts.down_proj.data), values, strict=True):
                to[expert] = value
        lora = {}
        for name in ("gate", "up", "down"):
            for side in "ab":
                value = state[f"layers.{index}.experts.{name}_lora_{side}"].clone()
                if seed and side == "a":
                    bound = value.shape[2] ** -0.5
                    value.uniform_(-bound, bound, generator=generator)
                lora[f"{name}_{side}"] = torch.nn.Parameter(value)
        factors += lora.values()
        experts.forward = Adapted(experts, lora)
        held += sum(one.nbytes for one in experts.parameters())
    return model, factors, held


class Adapted:
    """Transformers' experts, expert by expert, with factors of low rank."""

    def __init__(self, experts: Any, lora: dict[str, Any], scale: float = 2.0) -> None:
        self.experts, self.lora, self.scale = experts, lora, scale

    def linear(self, weight: torch.Tensor, a: Any, b: Any, x: torch.Tensor) -> torch.Tensor:
        """Compute W x, and B A x in f32, as PEFT does."""
        low = x.float() @ a.T @ b.T
        whole: torch.Tensor = torch.nn.functional.linear(x, weight) + (self.scale * low).to(x.dtype)
        return whole

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        e, out = self.experts, []
        # One node for the gradients of all experts: each by itself would be as large as all.
        factors = {name: one.unbind() for name, one in self.lora.items()}
        hit = [torch.where(ids == expert) for expert in range(len(e.down_proj))]
        for expert, (rows, slots) in enumerate(hit):
            gate_up = e.gate_up_proj[expert].chunk(2)
            ga, gb, ua, ub, da, db = (one[expert] for one in factors.values())
            gate = self.linear(gate_up[0], ga, gb, x[rows])
            up = self.linear(gate_up[1], ua, ub, x[rows])
            down = self.linear(e.down_proj[expert], da, db, e.act_fn(gate) * up)
            out.append((down * weights[rows, slots, None]).to(x.dtype))
        y = torch.zeros_like(x)
        return y.index_add(0, torch.cat([rows for rows, _ in hit]), torch.cat(out))


class Peak:
    """The most anonymous memory of this process in a block, in bytes, seen every 5 ms."""

    def __init__(self) -> None:
        self.bytes, self.started = 0, self.now()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.watch)

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join()

    @staticmethod
    def now() -> int:
        status = Path("/proc/self/status").read_text()
        kinds = re.findall(r"Rss(?:Anon|Shmem):\s*(\d+)", status)
        return 1024 * sum(map(int, kinds))

    def watch(self) -> None:
        while not self.ended.wait(0.005):
            self.bytes = max(self.bytes, self.now())


def train(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train one model in this process."""
    made = ktk_model if name == "ktk" else torch_model
    with Peak() as loading:
        model, factors, held = made(options, RUNS[name])
    with Peak() as training:
        optimizer = torch.optim.AdamW(factors, lr=options.rate, weight_decay=0)
        losses, begin = [], time.perf_counter()
        for ids in batches(options):
            optimizer.zero_grad()
            loss = model(ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            print(f"{name}: {len(losses)} {losses[-1]:.4f}", file=sys.stderr, flush=True)
        seconds = time.perf_counter() - begin
    return {
        "run": name,
        "losses": losses,
        "seconds": seconds,
        "started": loading.started,
        "experts": held,
        "factors": sum(one.nbytes for one in factors),
        "peak": max(loading.bytes, training.bytes),
    }


def report(found: list[dict[str, Any]]) -> None:
    """Print how far curves are from torch's, where that was run, and what memory was taken."""
    losses = {one["run"]: torch.tensor(one["losses"]) for one in found}
    stock = losses.pop("torch", None)
    if stock is not None:
        for name, curve in losses.items():
            off = (curve - stock).abs()
            print(f"{name} to torch: {off.mean():.4f} on average, {off.max():.4f} at most")
    for one in found:
        over = (one["peak"] - one["experts"]) / 1e9
        print(
            f"{one['run']}: loss {one['losses'][0]:.3f} to {one['losses'][-1]:.3f} in "
            f"{one['seconds']:.0f} s, at most {one['peak'] / 1e9:.2f} GB: experts "
            f"{one['experts'] / 1e9:.2f} GB and {over:.2f} GB more, of which factors "
            f"{4 * one['factors'] / 1e9:.2f} GB (with gradients and moments)"
        )


def plot(found: list[dict[str, Any]], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.2), layout="constrained")
    for one, style in zip(found, ("-", "--", ":"), strict=False):
        axes.plot(range(1, len(one["losses"]) + 1), one["losses"], style, label=one["run"])
    axes.set(xlabel="step", ylabel="loss", ylim=(0, None))
    axes.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="for the model; made where it is not there")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--runs", nargs="+", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--json", type=Path, help="a file, a line for each run")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--run", choices=["model", *RUNS], help="in this process, nothing else")
    options = parser.parse_args()
    if options.run == "model":
        return make_model(options.folder)
    if options.run:
        return print(json.dumps(train(options.run, options)))
    found = []
    for run in ("model", *options.runs):
        if run == "model" and (options.folder / "config.json").exists():
            continue
        command = [sys.executable, *sys.argv, "--run", run]
        line = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        if run != "model":
            found.append(json.loads(line.splitlines()[-1]))
    if options.json:
        options.json.write_text("".join(json.dumps(one) + "\n" for one in found))
    report(found)
    if options.plot:
        plot(found, options.plot)


if __name__ == "__main__":
    main()
