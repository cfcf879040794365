"""What memory cannot hold is refused before anything of it is loaded."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import ktk
from ktk import system
from ktk.cli import app
from ktk.ktmoe import KTMoEWrapper
from ktk.loading import room

E, K, H, I = 4, 2, 256, 512  # noqa: E741 - the names the table of families uses
LAYERS = 3
BESIDE = 2 * 3 * H * I * 4
KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    shapes = {"gate": (I, H), "up": (I, H), "down": (H, I)}
    tensors = {
        f"model.layers.{n}.mlp.experts.{e}.{part}_proj.weight": torch.full(shape, 0.01).bfloat16()
        for n in range(LAYERS)
        for e in range(E)
        for part, shape in shapes.items()
    }
    save_file(tensors, path / "model.safetensors")
    config = {"num_experts": E, "num_experts_per_tok": K, "hidden_size": H}
    (path / "config.json").write_text(json.dumps({**config, "moe_intermediate_size": I}))
    return path


@pytest.fixture
def available(monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(nbytes: int) -> None:
        monkeypatch.setattr(room, "available_memory", lambda: nbytes)

    return make


@pytest.fixture
def sizes(folder: Path) -> dict[str, int]:
    """What one layer takes."""
    return {name: ktk.MoE.from_checkpoint(folder, 0, name).nbytes for name in ("BF16", "AMXINT8")}


def test_a_model_is_refused_with_both_sizes_and_what_fits(
    folder: Path, available: Any, sizes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = []
    real = ktk.MoE.load_expert

    def load(self: ktk.MoE, *arguments: Any, **named: Any) -> None:
        loaded.append(self)
        real(self, *arguments, **named)

    monkeypatch.setattr(ktk.MoE, "load_expert", load)
    needed = LAYERS * sizes["BF16"] + BESIDE
    available(needed)
    ktk.Model.from_checkpoint(folder, "BF16")
    assert len(loaded) == LAYERS * E
    loaded.clear()
    available(needed - 1)
    with pytest.raises(ktk.CheckpointTooLarge) as caught:
        ktk.Model.from_checkpoint(folder, "BF16")
    assert not loaded
    said = str(caught.value)
    assert said.startswith(
        f"layers 0-2 for BF16 would take {needed / MIB:.1f} MiB of memory, and "
        f"{(needed - 1) / MIB:.1f} MiB are available. What fits: "
    )
    int8 = LAYERS * sizes["AMXINT8"] + BESIDE
    assert f"AMXINT8 ({int8 / MIB:.1f} MiB)" in said
    assert "or the first 2 of 3 layers (layers=0-1)" in said
    assert said.endswith("force=True loads it all the same")
    offered = re.findall(r"([A-Z]+\w*) \(([\d.]+) MiB\)", said)
    assert [float(size) for _, size in offered] == sorted(
        (float(size) for _, size in offered), reverse=True
    )
    ktk.Model.from_checkpoint(folder, "AMXINT8")
    ktk.Model.from_checkpoint(folder, "BF16", layers=[0, 1])
    loaded.clear()
    assert len(ktk.Model.from_checkpoint(folder, "BF16", force=True)) == LAYERS


def test_a_layer_is_refused_with_the_experts_that_fit(
    folder: Path, available: Any, sizes: dict[str, int]
) -> None:
    available(BESIDE + sizes["BF16"] * 3 // E)
    with pytest.raises(ktk.CheckpointTooLarge, match=r"^layer 1 for BF16 .* or 3 of its 4 experts"):
        ktk.MoE.from_checkpoint(folder, 1, "BF16")
    ktk.MoE.from_checkpoint(folder, 1, "BF16", experts=[0, 1, 3])
    ktk.MoE.from_checkpoint(folder, 1, "BF16", force=True)
    available(10)
    with pytest.raises(ktk.CheckpointTooLarge, match="No part of it fits"):
        ktk.MoE.from_checkpoint(folder, 1, "BF16")


def test_the_wrapper_refuses_as_well(folder: Path, available: Any) -> None:
    wrapper = KTMoEWrapper(
        layer_idx=0,
        num_experts=E,
        num_experts_per_tok=K,
        hidden_size=H,
        moe_intermediate_size=I,
        weight_path=str(folder),
        cpuinfer_threads=1,
        threadpool_count=1,
        method="BF16",
        mode="inference",
    )
    available(MIB)
    with pytest.raises(ktk.CheckpointTooLarge, match=r"would take .* of memory, and 1\.0 MiB are"):
        wrapper.load_weights()
    wrapper.load_weights(force=True)
    assert wrapper.moe is not None


@pytest.mark.slow
def test_the_demo_says_so_in_one_sentence(folder: Path, available: Any) -> None:
    available(MIB)
    done = CliRunner().invoke(app, ["demo", "--checkpoint", str(folder), "--backend", "BF16"])
    assert isinstance(done.exception, ktk.CheckpointTooLarge)


def test_high_is_a_limit_as_max_is(tmp_path: Path) -> None:
    for name, text in {
        "proc/meminfo": "MemTotal: 1000 kB\nMemAvailable: 900 kB\n",
        "proc/self/cgroup": "0::/a\n",
        "sys/fs/cgroup/a/memory.max": "max\n",
        "sys/fs/cgroup/a/memory.high": f"{500 * KIB}\n",
        "sys/fs/cgroup/a/memory.current": f"{200 * KIB}\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert system.available_memory(tmp_path) == 300 * KIB
    (tmp_path / "sys/fs/cgroup/a/memory.max").write_text(f"{400 * KIB}\n")
    assert system.available_memory(tmp_path) == 200 * KIB


_CHILD = """
import sys
from pathlib import Path
import ktk

group, used, limit, procs = Path(sys.argv[1]), *sys.argv[2:5]
(group / procs).write_text("0")
ktk.MoE.from_checkpoint(sys.argv[5], 0, "BF16", experts=[0])  # whatever is made once
now = int((group / used).read_text())
(group / limit).write_text(str(now + (8 << 20)))
try:
    ktk.Model.from_checkpoint(sys.argv[5], "BF16", layers=[0, 1])
except ktk.CheckpointTooLarge as error:
    print(error)
"""


@pytest.mark.slow
def test_the_limit_of_a_real_cgroup_is_seen(folder: Path) -> None:
    """Without the check the kernel would end the process, or reclaim for ever."""
    v2 = Path("/sys/fs/cgroup/cgroup.controllers").exists()
    parent = Path("/sys/fs/cgroup" if v2 else "/sys/fs/cgroup/memory")
    group = parent / f"ktk-test-{os.getpid()}"
    files = (
        ("memory.current", "memory.max")
        if v2
        else ("memory.usage_in_bytes", "memory.limit_in_bytes")
    )
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    try:
        if not (group / files[1]).exists():
            pytest.skip("the memory controller is not enabled for new groups here")
        done = subprocess.run(
            [sys.executable, "-c", _CHILD, str(group), *files, "cgroup.procs", str(folder)],
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        group.rmdir()
    assert done.returncode == 0, done.stderr
    assert "layers 0-1 for BF16 would take 9.0 MiB of memory, and" in done.stdout
