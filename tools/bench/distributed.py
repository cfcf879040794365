"""Times a divided layer of two processes of one thread against one process of two threads.

    python tools/bench/distributed.py [--tokens 1 8] [--replicas 64] [--json FILE]
        [--gbit 10 [--delay 50us]]

All are processes of one machine; they take turns in rounds, so that what else happens on the
machine happens to both. The layer is one of Qwen3-30B-A3B. With `--gbit` each of the two has a
network of its own, and what is between them sends no faster (as root); `--delay` wants the kernel's
`netem`. With `--replicas` so many experts are on both, and each token's are divided evenly where
they allow it.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import statistics
import subprocess
import tempfile
import time
from typing import Any

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 128, 8, 2048, 768
BACKEND = "AMXINT8"
# Calls take turns with what is compared: rounds, and seconds of each.
ROUNDS, SECONDS = 7, 0.25


def layer(experts: Any, cpus: list[int]) -> Any:
    """Return a layer with some of the experts, on these CPUs; all experts have the same weights."""
    import torch

    import ktk

    moe = ktk.load_backend(BACKEND).moe(
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        pool=ktk.WorkerPool(cpus=cpus),
    )
    random = torch.Generator().manual_seed(0)
    gate, up = (
        torch.randn(INTERMEDIATE, HIDDEN, generator=random).bfloat16() / 32 for _ in range(2)
    )
    down = torch.randn(HIDDEN, INTERMEDIATE, generator=random).bfloat16() / 32
    for expert in range(EXPERTS):
        if expert in experts:
            moe.load_expert(expert, gate, up, down)
        else:
            moe.leave_out(expert)
    return moe


def calls(tokens: int, number: int, even: bool, ranks: int = 2) -> list[Any]:
    """Return hidden, ids and weights of calls, the same in all processes.

    `even` gives each rank as many experts of each token, where no expert is on both; by default
    experts are drawn at random.
    """
    import torch

    random = torch.Generator().manual_seed(tokens)
    made = []
    for _ in range(number):
        if even:
            each, part = TOP_K // ranks, EXPERTS // ranks
            drawn = [
                torch.rand(tokens, part, generator=random).argsort(1)[:, :each] + part * rank
                for rank in range(ranks)
            ]
            ids = torch.cat(drawn, 1)
        else:
            ids = torch.rand(tokens, EXPERTS, generator=random).argsort(1)[:, :TOP_K]
        hidden = torch.randn(tokens, HIDDEN, generator=random).bfloat16()
        made.append((hidden, ids, torch.rand(tokens, TOP_K, generator=random)))
    return made


def new_network() -> None:
    """Give this process a network of its own, with nothing in it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x40000000) != 0:  # CLONE_NEWNET
        raise OSError(ctypes.get_errno(), "unshare: --gbit wants root")


def set_up_link(rank: int, gbit: float, delay: str | None) -> None:
    """Let this rank's end of the link have an address, and send so fast at most."""
    name = f"ktk{rank}"
    # A bucket has to hold what comes in a tick; what waits longer than the latency is dropped.
    bucket = f"tbf rate {gbit}gbit burst 1mb latency 50ms"
    shapes = [f"root handle 1: {bucket}"]
    if delay:
        shapes = [f"root handle 1: netem delay {delay}", f"parent 1: handle 2: {bucket}"]
    for command in (
        "ip link set lo up",
        f"ip addr add 10.97.0.{rank + 1}/24 dev {name}",
        f"ip link set {name} up",
        *(f"tc qdisc add dev {name} {shape}" for shape in shapes),
    ):
        subprocess.run(command.split(), check=True)
    os.environ |= {"GLOO_SOCKET_IFNAME": name, "KTK_ADDRESS": f"10.97.0.{rank + 1}"}


def serve(
    rank: int, size: int, store: str, pipe: Any, link: tuple[float, str | None], replicas: int
) -> None:
    """Time calls as asked through the pipe; rank -1 is the one process."""
    if rank >= 0 and link[0]:
        new_network()
        pipe.send("in a network")
        pipe.recv()
        set_up_link(rank, *link)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1 if rank >= 0 else size)
    layers: dict[str, Any] = {}
    if rank < 0:
        layers["one"] = layer(range(EXPERTS), list(range(size)))
    else:
        os.sched_setaffinity(0, {rank})
        from ktk.distributed import ExpertParallel, Placement

        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
        placement = Placement.contiguous(EXPERTS, size)
        if replicas:
            placement = Placement.balanced([1.0] * EXPERTS, size, replicas=replicas)
        moe = layer(placement.experts[rank], [rank])
        layers["shared"] = ExpertParallel(moe, placement=placement, shared=True, timeout=60)
        layers["split"] = ExpertParallel(moe, placement=placement, timeout=60)
    pipe.send("ready")
    made: dict[Any, Any] = {}
    while (asked := pipe.recv()) is not None:
        mode, tokens, even, count = asked
        if (tokens, even) not in made:
            made[tokens, even] = calls(tokens, max(2, min(64, 2048 // tokens)), even)
        inputs = made[tokens, even]
        if mode == "split":
            cut = slice(tokens * rank // size, tokens * (rank + 1) // size)
            if tokens < size:
                cut = slice(0, tokens if rank == 0 else 0)
            inputs = [[one[cut].contiguous() for one in call] for call in inputs]
        compute = layers[mode]
        compute(*inputs[-1])
        sent = compute.sent_bytes if rank >= 0 else 0
        took = []
        for number in range(count):
            begin = time.perf_counter()
            compute(*inputs[number % len(inputs)])
            took.append(time.perf_counter() - begin)
        sent = compute.sent_bytes - sent if rank >= 0 else 0
        pipe.send((statistics.median(took), sent / count))


class Bench:
    """The processes, and what they are asked."""

    def __init__(
        self, link: tuple[float, str | None] = (0, None), replicas: int = 0, size: int = 2
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self.folder = tempfile.TemporaryDirectory()
        self.pipes = {}
        processes = {}
        for rank in range(-1, size):
            self.pipes[rank], theirs = context.Pipe()
            given = (rank, size, f"{self.folder.name}/store", theirs, link, replicas)
            processes[rank] = context.Process(target=serve, args=given, daemon=True)
            processes[rank].start()
        if link[0]:
            ranks = [self.pipes[0], self.pipes[1]]
            for pipe in ranks:
                pipe.recv()
            ends = [f"ktk{rank} netns {processes[rank].pid}" for rank in (0, 1)]
            command = f"ip link add {ends[0]} type veth peer name {ends[1]}"
            subprocess.run(command.split(), check=True)
            for pipe in ranks:
                pipe.send("linked")
        for pipe in self.pipes.values():
            pipe.recv()

    def ask(self, mode: str, tokens: int, even: bool, count: int) -> tuple[float, float]:
        """Return seconds of a call, and bytes that all ranks sent in one."""
        ranks = [rank for rank in self.pipes if (rank < 0) == (mode == "one")]
        for rank in ranks:
            self.pipes[rank].send((mode, tokens, even, count))
        answers = [self.pipes[rank].recv() for rank in ranks]
        return max(took for took, _ in answers), sum(sent for _, sent in answers)

    def compare(self, tokens: int, even: bool) -> dict[str, Any]:
        """Let one process and two take turns."""
        first, _ = self.ask("one", tokens, even, 2)
        count = max(1, round(SECONDS / first))
        found: dict[str, list[tuple[float, float]]] = {"one": [], "shared": [], "split": []}
        for _ in range(ROUNDS):
            for mode, each in found.items():
                each.append(self.ask(mode, tokens, even, count))
        row: dict[str, Any] = {"tokens": tokens, "even": even}
        for mode, each in found.items():
            row[mode] = statistics.median(took for took, _ in each)
        for mode in ("shared", "split"):
            # Of neighbours in time.
            pairs = zip(found[mode], found["one"], strict=True)
            row[f"{mode}_ratio"] = statistics.median(two / one for (two, _), (one, _) in pairs)
            row[f"{mode}_bytes"] = found[mode][0][1] / tokens
        return row

    def close(self) -> None:
        """End the processes."""
        for pipe in self.pipes.values():
            pipe.send(None)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 8, 128, 1024])
    parser.add_argument("--json", help="also write the results here")
    parser.add_argument("--gbit", type=float, default=0, help="how fast the link between them is")
    parser.add_argument("--delay", help="of the link, one way, such as 50us")
    parser.add_argument("--replicas", type=int, default=0, help="experts that both hold")
    options = parser.parse_args()
    if options.delay and not options.gbit:
        parser.error("--delay is one of a link, which --gbit makes")
    bench = Bench((options.gbit, options.delay), options.replicas)
    rows = []
    print("tokens routing    one ms   shared  ratio    split  ratio  bytes/token shared, split")
    for tokens in options.tokens:
        for even in (False,) if options.replicas else (False, True):
            row = bench.compare(tokens, even)
            rows.append(row)
            print(
                f"{tokens:6} {'even' if even else 'random':7} {row['one'] * 1e3:9.3f} "
                f"{row['shared'] * 1e3:8.3f} {row['shared_ratio']:6.3f} {row['split'] * 1e3:8.3f} "
                f"{row['split_ratio']:6.3f}  {row['shared_bytes']:9.0f} {row['split_bytes']:9.0f}",
                flush=True,
            )
    bench.close()
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
