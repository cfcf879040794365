"""Models whose experts processes divide: torchrun, and transformers' plan of expert parallelism."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from transformers.distributed.configuration_utils import DistributedConfig

import ktk.transformers  # noqa: F401

SCRIPT = Path(__file__).parent / "divided_model.py"


def results(folder: Path, backend: str, out: Path, ranks: int = 0) -> dict[str, Any]:
    """Return what each process computed, by rank."""
    launch = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
    ]
    command = [
        sys.executable,
        *(launch if ranks else []),
        str(SCRIPT),
        str(folder),
        backend,
        str(out),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    names = map(str, range(ranks)) if ranks else ["one"]
    return {name: torch.load(f"{out}.{name}") for name in names}


# gpt-oss has biases, which transformers' plan divides as well.
@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss"])
def test_two_processes_compute_what_one_does(family: str, tmp_path: Path) -> None:
    folder = tiny.FAMILIES[family].save(tmp_path / "model")
    one = results(folder, "BF16", tmp_path / "results")["one"]
    first, second = results(folder, "BF16", tmp_path / "results", 2).values()
    assert torch.equal(first["logits"], second["logits"])
    assert torch.equal(first["tokens"], one["tokens"])
    assert torch.equal(second["tokens"], one["tokens"])
    # Sums of two ranks in f32 are as far apart as sums of experts in another order: far below what
    # float32 itself is from exact here.
    exact = tiny.float32(folder).double()
    with torch.no_grad():
        expected = exact(torch.arange(3, 15)[None]).logits
    error = (one["logits"] - expected).abs().max()
    assert (first["logits"] - one["logits"]).abs().max() < error
    for mine, other in zip(first["experts"], second["experts"], strict=True):
        assert sorted(mine + other) == list(range(tiny.EXPERTS))
        assert len(mine) == len(other)
    # Each process has CPUs of its own, its workers among them.
    allowed = sorted(os.sched_getaffinity(0))
    for process in (first, second):
        assert set(process["workers"]) <= set(process["cpus"])
    if len(allowed) > 1:
        assert sorted(first["cpus"] + second["cpus"]) == allowed


def test_what_is_not_divided_is_said(tmp_path: Path) -> None:
    folder = tiny.FAMILIES["mixtral"].save(tmp_path / "model")
    config = transformers.AutoConfig.from_pretrained(folder)
    config.distributed_config = DistributedConfig(tp_size=1, ep_size=1)
    with pytest.raises(ValueError, match=r"DistributedConfig\(tp_size=N, ep_size=N\)"):
        tiny.load(folder, config=config, experts_implementation="ktk")
