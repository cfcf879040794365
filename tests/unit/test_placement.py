"""Masks for GPUs, of counts, and files of both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from ktk import CheckpointError, KTMoEWrapper, generate_gpu_experts_masks
from ktk.cli import app
from ktk.distributed import Placement
from ktk.placement import (
    STRATEGIES,
    load_counts,
    load_masks,
    place,
    save_counts,
    save_for_sglang,
    save_masks,
)

L, E = 5, 8


def frequency(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 100, (L, E))


def reference(strategy: str, counts: np.ndarray, number: int) -> np.ndarray:
    """Return masks as the definitions say, expert by expert."""
    mask, left = np.zeros((L, E), bool), min(number, L * E)
    pairs = [(layer, expert) for layer in range(L) for expert in range(E)]
    if strategy == "frequency":
        pairs.sort(key=lambda pair: -counts[pair])
    elif strategy == "random":
        order = torch.randperm(L * E, generator=torch.Generator().manual_seed(42))
        pairs = [pairs[at] for at in order.tolist()]
    elif strategy == "uniform":
        pairs.sort(key=lambda pair: (pair[1], pair[0]))
    for pair in pairs[:left]:
        mask[pair] = True
    return mask


@pytest.mark.parametrize("number", [0, 1, 4, 5, 7, 13, 39, 40, 41, 1000])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategies_are_as_defined(strategy: str, number: int) -> None:
    counts: Any = frequency()
    mask = generate_gpu_experts_masks(counts, number, strategy)
    assert mask.dtype == torch.bool
    assert np.array_equal(mask.numpy(), reference(strategy, counts, number))


def test_masks_of_sglang() -> None:
    """What SGLang's own tests say of its strategies, without the rows of dense layers."""
    four = torch.zeros(4, 4)
    assert generate_gpu_experts_masks(four, 5, "front-loading").sum(1).tolist() == [4, 1, 0, 0]
    even = generate_gpu_experts_masks(torch.zeros(4, 8), 10, "uniform")
    assert even.sum(1).tolist() == [3, 3, 2, 2]
    first = generate_gpu_experts_masks(torch.zeros(4, 8), 6, "random", seed=17)
    assert torch.equal(first, generate_gpu_experts_masks(torch.ones(4, 8), 6, "random", seed=17))
    assert not torch.equal(first, generate_gpu_experts_masks(torch.zeros(4, 8), 6, "random"))
    assert int(first.sum()) == 6
    with pytest.raises(ValueError, match="strategy must be one of frequency, uniform, front-l"):
        generate_gpu_experts_masks(four, 5, "best")


def test_files_of_counts_and_masks_come_back(tmp_path: Path) -> None:
    counts = {7: frequency()[0], 3: frequency()[1]}
    save_counts(tmp_path / "counts.json", counts)
    found = load_counts(tmp_path / "counts.json", num_experts=E)
    assert list(found) == [3, 7]
    assert all(np.array_equal(found[n], counts[n]) for n in found)
    masks = place(found, 5)
    save_masks(tmp_path / "gpu.json", masks)
    again = load_masks(tmp_path / "gpu.json", num_experts=E)
    assert list(again) == [3, 7]
    assert sum(int(mask.sum()) for mask in again.values()) == 5
    assert all(torch.equal(again[n], masks[n]) for n in masks)
    wrapper = KTMoEWrapper(3, E, 2, 64, 64, again[3], method="BF16", cpuinfer_threads=1)
    assert torch.equal(wrapper.gpu_experts_mask, masks[3])
    counts_of_one: Any = found[3]
    assert Placement.balanced(counts_of_one, 2).num_experts == E


def test_files_of_sglang_come_back(tmp_path: Path) -> None:
    path = tmp_path / "counts.pt"
    counts = {1: frequency()[0], 3: frequency()[1]}
    save_for_sglang(path, counts, 6)
    told = torch.load(path, weights_only=True)["logical_count"]
    assert list(told.shape) == [1, 6, E]
    assert not told[0, [0, 2, 4, 5]].any()
    found = load_counts(path)
    assert list(found) == [1, 3]
    assert all(np.array_equal(found[n], counts[n]) for n in found)
    torch.save(torch.cat([told, told]), path)  # steps are summed, and a plain tensor will do
    assert np.array_equal(load_counts(path)[3], 2 * counts[3])
    with pytest.raises(ValueError, match="layer 3 has counts, and the model 3 layers"):
        save_for_sglang(path, counts, 3)


GOOD = {"format": "ktk.expert_counts", "version": 1, "layers": {"0": [1, 2]}}
MASKS = {"format": "ktk.gpu_experts", "version": 1, "num_experts": 4, "layers": {"0": [1, 3]}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read"),
        ("[1]", "cannot be read"),
        (GOOD | {"format": "ktk.gpu_experts"}, "is no file of ktk.expert_counts: its format is"),
        (GOOD | {"version": 2}, "has version 2 of ktk.expert_counts, this ktk reads 1"),
        (GOOD | {"layers": {}}, "has no layers"),
        (GOOD | {"layers": {"x": [1, 2]}}, "has a layer 'x', expected a number"),
        (GOOD | {"layers": {"3": [1], "03": [2]}}, "has a layer '03', expected a number"),
        (GOOD | {"layers": {"9" * 5000: [1]}}, "has a layer '99999999999999999999'..., expected"),
        (GOOD | {"layers": {"0": [1, -2]}}, "layer 0: -2 is no such number"),
        (GOOD | {"layers": {"0": [1.5, 2]}}, "layer 0: 1.5 is no such number"),
        (GOOD | {"layers": {"0": [2**64]}}, "is no such number"),
        (GOOD | {"layers": {"0": 3}}, "layer 0: 3 is no such number"),
        (GOOD, "has counts of 2 experts for layer 0, expected 8: is it of another model?"),
    ],
)
def test_a_wrong_file_of_counts_is_named(
    content: str | dict[str, object], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "counts.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(CheckpointError, match=r"counts\.json") as raised:
        load_counts(path, num_experts=E)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (GOOD, "is no file of ktk.gpu_experts: its format is 'ktk.expert_counts'"),
        (MASKS | {"num_experts": 0}, "has 0 experts, expected a number from 1 on"),
        (MASKS | {"num_experts": 3}, "layer 0: expert 3 is not one of 3"),
        (MASKS | {"layers": {"0": [True]}}, "layer 0: True is no such number"),
        (MASKS, "is of layers of 4 experts, the model has 8: is it of another model?"),
    ],
)
def test_a_wrong_file_of_masks_is_named(
    content: dict[str, object], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps(content))
    count = 8 if message.startswith("is of") else None
    with pytest.raises(CheckpointError, match=r"gpu\.json") as raised:
        load_masks(path, num_experts=count)
    assert message in str(raised.value)


def test_other_files_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"counts\.json is missing"):
        load_counts(tmp_path / "counts.json")
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        load_counts(tmp_path / "counts.pt")
    (tmp_path / "counts.pt").write_bytes(b"no tensors")
    with pytest.raises(CheckpointError, match="cannot be read: it is no file of tensors"):
        load_counts(tmp_path / "counts.pt")
    (tmp_path / "counts.pt").write_bytes(b"hello\n")  # torch raises a KeyError
    with pytest.raises(CheckpointError, match="cannot be read: it is no file of tensors"):
        load_counts(tmp_path / "counts.pt")
    for wrong_counts_of_steps, message in (
        (torch.ones(1, 2, 3).to_sparse(), "without plain numbers"),
        (torch.ones(1, 2, 3, device="meta"), "without plain numbers"),
        (torch.ones(1, 2, 3).to(torch.float8_e4m3fn), "without plain numbers"),
        (torch.full((1, 2, 3), 0.6), "no whole numbers from 0 on"),
        (torch.full((4, 2, 3), 2**62), "beyond 64 bits"),
    ):
        torch.save({"logical_count": wrong_counts_of_steps}, tmp_path / "counts.pt")
        with pytest.raises(CheckpointError, match=message):
            load_counts(tmp_path / "counts.pt")
    for dtype in (torch.uint16, torch.uint64, torch.float32):
        torch.save({"logical_count": torch.full((2, 1, 3), 5).to(dtype)}, tmp_path / "counts.pt")
        assert load_counts(tmp_path / "counts.pt")[0].tolist() == [10, 10, 10]
    save_for_sglang(tmp_path / "counts.pt", {0: [2**63 - 1]})
    assert load_counts(tmp_path / "counts.pt")[0].tolist() == [2**63 - 1]
    torch.save({"count": torch.ones(2)}, tmp_path / "counts.pt")
    with pytest.raises(CheckpointError, match="has no logical_count"):
        load_counts(tmp_path / "counts.pt")
    with pytest.raises(CheckpointError, match="cannot be written: No such file"):
        save_counts(tmp_path / "none" / "counts.json", {0: [1]})
    for wrong in ([-1], [0.5], [[1]], [], [2**64], [2**63]):
        with pytest.raises(ValueError, match=r"counts must be whole numbers"):
            save_counts(tmp_path / "counts.json", {0: wrong})
    for fraction in ([0.7, 0.2, 0.1], [float("nan"), 1.0], [-3, 1]):
        with pytest.raises(ValueError, match="layer 0: counts must be whole numbers from 0 on"):
            save_for_sglang(tmp_path / "other.pt", {0: fraction})
    assert not (tmp_path / "other.pt").exists()
    with pytest.raises(ValueError, match="no layers to write"):
        save_counts(tmp_path / "counts.json", {})
    half: Any = 0.5
    with pytest.raises(TypeError, match="float"):
        save_counts(tmp_path / "counts.json", {half: [1]})
    for wrong_layer in (-1, 10**10):
        with pytest.raises(ValueError, match=f"{wrong_layer} is no number of a layer"):
            save_counts(tmp_path / "counts.json", {wrong_layer: [1]})
        with pytest.raises(ValueError, match=f"{wrong_layer} is no number of a layer"):
            save_masks(tmp_path / "gpu.json", {wrong_layer: torch.ones(2, dtype=torch.bool)})
    for wrong_mask in (
        torch.tensor([0, 5, 7]),
        torch.ones(0, dtype=torch.bool),
        torch.ones(2, 2, dtype=torch.bool),
    ):
        with pytest.raises(TypeError, match=r"layer 0: a mask must be bool \[num_experts\], got"):
            save_masks(tmp_path / "gpu.json", {0: wrong_mask})
    assert not list(tmp_path.glob("*.json"))
    with pytest.raises(ValueError, match=r"layers have \[1, 2\] experts"):
        place({0: [1], 1: [1, 2]}, 1)
    wrong_counts: list[tuple[dict[int, Any], str]] = [
        ({}, "no layers whose counts"),
        ({0: [1, 2], 1: [1, 2, 3]}, r"shapes \[\[2\], \[3\]\], expected \[experts\], alike"),
        ({0: [[1, 2]]}, r"shapes \[\[1, 2\]\], expected"),
        ({0: [1], -1: [1]}, "layer -1 has counts"),
    ]
    for counts, message in wrong_counts:
        with pytest.raises(ValueError, match=message):
            save_for_sglang(tmp_path / "some.pt", counts)
    with pytest.raises(CheckpointError, match=r"none/some\.pt cannot be written: No such file"):
        save_for_sglang(tmp_path / "none" / "some.pt", {0: [1]})
    assert not (tmp_path / "some.pt").exists()
    for number in (-1, 2.5):
        with pytest.raises(ValueError, match="num_gpu_experts must be an integer of at least 0"):
            place({0: [1, 2]}, number)  # type: ignore[arg-type]


def test_the_command(tmp_path: Path) -> None:
    source, masks, sglang = (tmp_path / name for name in ("counts.json", "gpu.json", "gpu.pt"))
    counts = {3: np.arange(E), 4: np.full(E, 2)}
    save_counts(source, counts)
    run = CliRunner().invoke(
        app,
        ["placement", str(source), "-n", "2", "-o", str(masks), "--sglang", str(sglang), "--json"],
    )
    assert run.exit_code == 0, run.output
    told = json.loads(run.stdout)
    assert told["gpu_experts"] == 4
    assert told["covered"] == pytest.approx((7 + 6 + 5 + 4) / 44)
    assert [one["gpu_experts"] for one in told["layers"]] == [4, 0]
    assert torch.nonzero(load_masks(masks)[3]).flatten().tolist() == [4, 5, 6, 7]
    made = torch.load(sglang, weights_only=True)["logical_count"].sum(0).float()
    assert list(made.shape) == [5, E]
    chosen = generate_gpu_experts_masks(made, 4)  # as SGLang does
    assert torch.equal(chosen[3], load_masks(masks)[3])
    run = CliRunner().invoke(
        app,
        [
            "placement",
            str(source),
            "--ratio",
            "0.5",
            "--strategy",
            "uniform",
            "--sglang",
            str(sglang),
        ],
    )
    assert run.exit_code == 0, run.output
    assert "8 of 16" in run.stdout
    made = torch.load(sglang, weights_only=True)["logical_count"].sum(0).float()
    assert generate_gpu_experts_masks(made, 8).sum(1).tolist() == [0, 0, 0, 4, 4]
    save_counts(source, {0: [1] * 100})
    run = CliRunner().invoke(app, ["placement", str(source), "--ratio", "0.29", "--json"])
    assert json.loads(run.stdout)["gpu_experts"] == 29, "the float is a little less than that"
    save_counts(source, {0: [2**63 - 1, 2**63 - 1], 1: [1, 0]})  # a sum of more than 64 bits
    run = CliRunner().invoke(app, ["placement", str(source), "-n", "1"])
    assert run.stdout.split()[-2:] == ["100.0", "%"]
    assert CliRunner().invoke(app, ["placement", str(source)]).exit_code == 2
    wrong = ["placement", str(source), "-n", "1", "--strategy", "best"]
    assert CliRunner().invoke(app, wrong).exit_code == 2
    with pytest.raises(CheckpointError, match="is no file of counts, which frequency needs"):
        CliRunner().invoke(app, ["placement", str(tmp_path), "-n", "1"], catch_exceptions=False)
    gone = str(tmp_path / "gone.json")
    with pytest.raises(CheckpointError, match=r"gone\.json is missing"):
        CliRunner().invoke(app, ["placement", gone, "-n", "1"], catch_exceptions=False)
