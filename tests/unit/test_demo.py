"""The demo runs every variant and tells the truth about its error."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

import ktk
import ktk.demo.measure
from ktk import _probe
from ktk.bench.limits import Limits
from ktk.bench.records import Subject
from ktk.bench.runner import _candidate
from ktk.checkpoint.config import read_config
from ktk.checkpoint.safetensors import SafetensorsCheckpoint
from ktk.demo import model, run_demo
from ktk.demo.report import print_json, print_report
from ktk.demo.routing import batches
from ktk.errors import CheckpointFormatError

PROMISED = {"BF16": 0.0025, "AMXINT8": 0.0280}


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    sizes = {"hidden_size": 192, "moe_intermediate_size": 72, "num_experts": 8}
    monkeypatch.setattr(model, "CONFIG", {**model.CONFIG, **sizes, "num_experts_per_tok": 3})
    return model.write_checkpoint(tmp_path)


def test_the_checkpoint_is_what_a_hub_holds(small: Path) -> None:
    index = json.loads((small / "model.safetensors.index.json").read_text())
    shards = {file: load_file(small / file) for file in set(index["weight_map"].values())}
    assert len(shards) == 2
    for name, file in index["weight_map"].items():
        assert name in shards[file]
    total = sum(tensor.nbytes for shard in shards.values() for tensor in shard.values())
    assert index["metadata"]["total_size"] == total
    assert all(t.dtype == torch.bfloat16 for shard in shards.values() for t in shard.values())


@pytest.mark.parametrize("tokens", [1, 5])
def test_every_expert_is_taken_in_turn_and_once_by_a_token(small: Path, tokens: int) -> None:
    config = read_config(small)
    calls = batches(config, tokens, 16)
    assert all(len(set(row)) == 3 for call in calls for row in call.ids.tolist())
    taken = torch.bincount(torch.cat([call.ids.flatten() for call in calls]), minlength=8)
    assert taken.min() > 0


def test_the_task_is_checked_against_the_definition(small: Path) -> None:
    """Compare with the sum written out for one token."""
    task = ktk.demo._task(small, 0, {})
    with SafetensorsCheckpoint(small) as checkpoint:
        layer = checkpoint.layer(0)
        x, total = task.check.hidden[1].double(), torch.zeros(192, dtype=torch.float64)
        routing = zip(task.check.ids[1].tolist(), task.check.weights[1].tolist(), strict=True)
        for e, weight in routing:
            part = {name: tensor.double() for name, tensor in layer.expert(e).arrays().items()}
            gate = part["gate"] @ x
            total += weight * (part["down"] @ (gate / (1 + (-gate).exp()) * (part["up"] @ x)))
    np.testing.assert_allclose(task.expected[1], total.numpy(), rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_a_reason_is_given_once(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a backend that takes nothing of it, and of instructions that several lack."""
    with mock.patch.object(ktk.demo.measure, "measure", side_effect=CheckpointFormatError("no")):
        assert run_demo(checkpoint=small, layer=0, names=["BF16", "AMXINT8", "AMXINT4"]) == []
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("not run: ")]
    reasons = [line.rpartition(": ")[2] for line in lines]
    assert len(set(reasons)) == len(reasons)
    assert "not run: BF16, AMXINT8, AMXINT4: no" in lines


@pytest.mark.slow
def test_figures_come_as_json(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = run_demo(checkpoint=small, layer=0, names=["BF16"], as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert [one["variant"] for one in document["measured"]] == [row.variant for row in rows]
    for one, row in zip(document["measured"], rows, strict=True):
        assert one["error"] == row.error
        assert one["decode"]["seconds"] == row.decode.seconds
    assert document["layer"] == 0
    assert all(one["reason"].startswith("this CPU lacks ") for one in document["not_run"])


@pytest.mark.slow
@pytest.mark.parametrize("columns", [40, 80])
def test_nothing_is_cut_off(
    small: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    [row, *_] = run_demo(checkpoint=small, layer=0, names=["BF16"])
    limits = Limits(threads=1, read_bytes_per_s=1e9, peak_ops_per_s={})
    longest = replace(row, backend="LLAMAFILE", variant="avx512_vnni", error=0.1234)
    print_report(Console(), [row, longest], [], limits, "go on")
    table = capsys.readouterr().out.split("error: against")[-2]
    assert "…" not in table
    for words in ("LLAMAFILE", "avx512_vnni", "0.1234", f"{row.prefill.seconds * 1e3:.2f}"):
        assert words in table


@pytest.mark.slow
def test_what_a_cache_gave_has_no_fraction(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [row, *_] = run_demo(checkpoint=small, layer=0, names=["BF16"])
    slow = Limits(threads=1, read_bytes_per_s=1.0, peak_ops_per_s={})
    print_json("", 0, [row], {}, slow)
    text = capsys.readouterr().out
    assert json.loads(text[text.index("\n{") :])["measured"][0]["decode"]["fraction"] is None
    print_report(Console(), [row], [], slow, "go on")
    assert "-: faster than that, so weights came from a cache" in " ".join(
        capsys.readouterr().out.split()
    )


@pytest.mark.slow
def test_every_variant_that_can_run_is_shown(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = list(PROMISED)
    rows = run_demo(checkpoint=small, layer=0, names=names)
    runnable = [
        (name, variant.name)
        for name in names
        for variant in ktk.load_backend(name).variants
        if variant.runnable
    ]
    assert [(row.backend, row.variant) for row in rows] == runnable
    for row in rows:
        assert 0 < row.error <= PROMISED[row.backend], row
        assert row.nbytes > 0
        assert (row.decode.tokens, row.prefill.tokens) == (1, 256)
        assert row.decode.seconds > 0
        assert row.prefill.seconds > 0
    text = capsys.readouterr().out
    assert all(variant in text for _, variant in runnable)
    assert text.splitlines()[-1].startswith("Next: ")
    assert f'ktk.MoE.from_checkpoint("{small}", 0,' in text


@pytest.mark.slow
def test_steps_are_lines_where_nobody_watches(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_demo(checkpoint=small, layer=0, names=["BF16"])
    steps = capsys.readouterr().err.splitlines()
    assert steps[0] == "computing the layer in float64"
    variants = [one.name for one in ktk.load_backend("BF16").variants if one.runnable]
    assert steps[1:] == [f"running BF16 {name}" for name in variants]


@pytest.mark.parametrize(("gated", "products"), [(True, 3), (False, 2)])
def test_operations_are_those_of_the_matrices_that_are_there(
    gated: bool, products: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Layer:
        expert_nbytes = 1
        config: Any = ktk.MoEConfig(
            num_experts=8,
            num_experts_per_tok=2,
            hidden_size=64,
            intermediate_size=32,
            gated=gated,
        )

        def __call__(self, *_: torch.Tensor) -> None: ...

    monkeypatch.setattr(ktk.demo.measure, "_SECONDS", 0.0)
    layer: Any = Layer()
    found = ktk.demo.measure._time(layer, batches(layer.config, 4, 2), ())
    assert found.flops == 2 * products * 64 * 32 * 4 * 2


def test_more_threads_than_cpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ktk, "default_pool", lambda: SimpleNamespace(size=99999))
    with pytest.raises(ValueError, match="99999 threads are more than"):
        run_demo(checkpoint=None, layer=None, names=["BF16"])


@pytest.mark.slow
def test_a_variant_is_limited_by_the_unit_that_bench_takes(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Codes of four bits have units that codes of eight have not."""
    rows = run_demo(checkpoint=small, layer=0, names=["AMXINT4"], as_json=True)
    measured = json.loads(capsys.readouterr().out)["limits"]["peak_ops_per_s"]
    assert rows
    backend = ktk.load_backend("AMXINT4")
    for row in rows:
        moe = ktk.MoE.from_checkpoint(small, 0, backend, variant=row.variant)
        expected = _candidate(Subject(row.backend), backend, [moe]).units
        assert row.prefill.units == row.decode.units == expected
        assert set(expected) & set(_probe.units()) <= set(measured)
