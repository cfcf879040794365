"""GPTQ with desc_act: codes are kept, through conversion, shards and tensors that hosts bring."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from meanings import save
from schemes import SIZES, U4_ZERO, E
from written import Integers, all_random, gptq, values

import ktk
from ktk import _core
from ktk.checkpoint import open_checkpoint
from ktk.checkpoint.safetensors.tensor_file import TensorFile
from ktk.checkpoint.verify import verify
from ktk.conversion import convert
from ktk.errors import CheckpointError
from ktk.quantize import quantize

H, I = 192, 160  # noqa: E741 - as in schemes
CONFIG: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}


def written(folder: Path, *, in_order: int | None = 0) -> dict[tuple[str, int], Integers]:
    """Write a layer; no token came to expert `in_order` in calibration, which keeps its columns."""
    made = all_random(4, 32, zeros=True, sort=True)
    for part in SIZES:
        if in_order is not None:
            one = made[part, in_order]
            one.order = np.sort(one.order)
    folder.mkdir(parents=True, exist_ok=True)
    save(folder, {key: gptq(one, 4) for key, one in made.items()}, {**CONFIG, "sym": False})
    return made


def same_values(moe: ktk.MoE, made: dict[tuple[str, int], Integers]) -> None:
    want = values(made)
    for e in range(E):
        for part, matrix in zip(SIZES, moe.unpack_expert(e), strict=True):
            np.testing.assert_array_equal(matrix, want[part, e].astype(np.float32))


def call(moe: ktk.MoE, tokens: int = 20) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(tokens, H, generator=generator)
    ids = torch.randint(0, E, (tokens, 1), generator=generator)
    result: torch.Tensor = moe(hidden, ids, torch.rand(tokens, 1, generator=generator))
    return result


@pytest.mark.parametrize("in_order", [None, 0, 1])
def test_what_was_converted_computes_the_same_bits(tmp_path: Path, in_order: int | None) -> None:
    made = written(tmp_path / "source", in_order=in_order)
    moe = ktk.MoE.from_checkpoint(tmp_path / "source", 3)
    assert moe.backend.name == "AMXINT4"
    [plan] = convert(tmp_path / "source", tmp_path / "packed", backend="AMXINT4")
    assert plan.encoder.how == "stored as they are"
    assert not verify(tmp_path / "packed").faults
    for shards in (1, 2, 3):
        again = ktk.MoE.from_checkpoint(tmp_path / "packed", 3, shards=shards)
        same_values(again, made)
        source = ktk.MoE.from_checkpoint(tmp_path / "source", 3, shards=shards)
        assert torch.equal(call(again), call(source))
    for folder in ("packed", "source"):
        with open_checkpoint(tmp_path / folder) as checkpoint:
            assert checkpoint.layer(3).orders == tuple(SIZES)


def test_readers_that_know_no_orders_refuse_the_files(tmp_path: Path) -> None:
    written(tmp_path / "source")
    for backend, version in (("AMXINT4", 2), ("AMXINT8", 1)):  # the second takes decoded floats
        convert(tmp_path / "source", tmp_path / backend, backend=backend)
        [file] = (tmp_path / backend).glob("*.safetensors")
        entries = json.loads(TensorFile(file).metadata["ktk"])
        assert entries["version"] == version
        assert entries.get("orders") == (["gate", "up", "down"] if version == 2 else None)


def test_decoded_for_a_backend_of_floats_they_are_where_they_belong(tmp_path: Path) -> None:
    made = written(tmp_path)
    moe = ktk.MoE.from_checkpoint(tmp_path, 3, "BF16")
    for e in range(E):
        for part, matrix in zip(SIZES, moe.unpack_expert(e), strict=True):
            want = torch.from_numpy(values(made)[part, e]).float().bfloat16().float()
            np.testing.assert_array_equal(matrix, want)


@pytest.mark.parametrize("ranks", [1, 2])
def test_tensors_that_hosts_bring(tmp_path: Path, ranks: int) -> None:
    made = written(tmp_path)
    config = ktk.MoEConfig(num_experts=E, num_experts_per_tok=1, hidden_size=H, intermediate_size=I)
    moes = []
    for rank in range(ranks):
        collector = ktk.ExpertCollector(
            config,
            ("qweight", "scales", "qzeros", "g_idx"),
            quantization={**CONFIG, "sym": False},
            rank=rank,
            ranks=ranks,
        )
        for (part, e), one in made.items():
            for suffix, tensor in gptq(one, 4).items():
                collector.take(e, part, suffix.lstrip("."), tensor)
        moes.append(collector.finish())
    assert {moe.backend.name for moe in moes} == {"AMXINT4"}
    want = call(ktk.MoE.from_checkpoint(tmp_path, 3))
    if ranks == 1:
        same_values(moes[0], made)
        assert torch.equal(call(moes[0]), want)
    else:
        x = np.random.default_rng(0).standard_normal((5, H))
        for e in range(E):
            total = sum(in_float64(x, *moe.unpack_expert(e)) for moe in moes)
            whole = in_float64(x, *(values(made)[part, e] for part in SIZES))
            # Codes are what they were: float64 adds up 160 products in two orders.
            np.testing.assert_allclose(total, whole, rtol=0, atol=2**-44 * np.abs(whole).max())


def test_slots_that_hold_one_expert_share_its_order(tmp_path: Path) -> None:
    made = written(tmp_path)
    moe = ktk.MoE.from_checkpoint(tmp_path, 3, physical_to_logical_map=[1, 1])
    for slot in range(2):
        for part, matrix in zip(SIZES, moe.unpack_expert(slot), strict=True):
            np.testing.assert_array_equal(matrix, values(made)[part, 1].astype(np.float32))
    # Both want tokens sorted alike, which are encoded once for both.
    hidden, weights = torch.randn(6, H), torch.ones(6, 1)
    both = [moe(hidden, torch.full((6, 1), slot), weights) for slot in range(2)]
    assert torch.equal(*both)
    moe.load_expert(0, *in_no_order())
    assert torch.equal(moe(hidden, torch.ones(6, 1, dtype=torch.long), weights), both[1])


def in_float64(x: np.ndarray, *weights: Any) -> np.ndarray:
    gate, up, down = (one.astype(np.float32).astype(np.float64) for one in weights)
    y = x @ gate.T
    product: np.ndarray = (y / (1 + np.exp(-y)) * (x @ up.T)) @ down.T
    return product


def in_no_order() -> list[Any]:
    """Another expert of the same formats, as arguments of `load_expert`."""
    generator = torch.Generator().manual_seed(1)
    shapes = SIZES.values()
    made = [quantize(torch.randn(size, generator=generator), U4_ZERO) for size in shapes]
    return made


def test_they_are_not_written_for_gpus(tmp_path: Path) -> None:
    made = all_random(4, 32, sort=True, dtype=torch.bfloat16)
    save(tmp_path, {key: gptq(one, 4) for key, one in made.items()}, {**CONFIG, "sym": True})
    moe = ktk.MoE.from_checkpoint(tmp_path, 3)
    assert moe.backend.name == "RAWINT4"
    wanted = "expert 0 wants columns of its input in an order of its own"
    with pytest.raises(ValueError, match=wanted):
        _core.submit_write(moe._core, 0, [(1, 1, 1, 1)], False)


def test_an_order_that_lacks_columns_is_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "packed", backend="AMXINT4")
    with open_checkpoint(tmp_path / "packed") as checkpoint:
        layer = checkpoint.layer(3)
        read = layer._bytes  # type: ignore[attr-defined]
        monkeypatch.setattr(layer, "_check", lambda *arguments: None)
        monkeypatch.setattr(
            layer,
            "_bytes",
            lambda name, number: read(name, number) * (0 if name == "up_order" else 1),
        )
        with pytest.raises(CheckpointError, match=r"up of expert 1 in .* lacks columns"):
            layer.expert(1)
