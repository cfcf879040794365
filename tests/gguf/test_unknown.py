"""Files whose architecture is new: tensors say the sizes, and somebody the activation function."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf_files as files
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf_files import FIELDS, E, H, I, Tensor
from typer.testing import CliRunner

import ktk
from ktk.checkpoint import describe
from ktk.checkpoint.open import open_checkpoint
from ktk.cli import app
from ktk.errors import CheckpointError

# Nothing but what llama.cpp cannot do without.
FEW = {"expert_used_count": files.TOP}


def ungated(parts: dict[str, Tensor]) -> dict[str, Tensor]:
    return files.stacked({part: one for part, one in parts.items() if "gate" not in part})


LAYOUTS: dict[str, Any] = {
    "stacked": (files.stacked, "silu", {}),
    "fused": (files.fused, "gelu_tanh", {}),
    "single": (files.single, "silu", {}),
    "without a gate": (ungated, "relu2", {}),
    "with biases": (files.stacked, "swigluoai", {"bias": True}),
    "fused with biases": (files.fused, "swigluoai", {"bias": True}),
}


@pytest.mark.parametrize("fields", [FIELDS, FEW], ids=["all sizes", "no sizes"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_tensors_say_the_rest(layout: str, fields: dict[str, Any], tmp_path: Path) -> None:
    name, activation, options = LAYOUTS[layout]
    parts = files.experts("Q8_0", **options)
    new = files.write(tmp_path / "new.gguf", name(parts), arch="newmoe", fields=fields)
    moe = ktk.MoE.from_checkpoint(new, 0, activation=activation)
    assert (moe.config.num_experts, moe.config.hidden_size, moe.config.intermediate_size) == (
        *(E, H, I),
    )
    assert moe.config.activation == activation
    assert moe.config.gated == (layout != "without a gate")
    # The same as of tensors that are given.
    stacks: dict[str, Any] = {
        part: torch.from_numpy(one.values.astype(np.float32))
        for part, one in parts.items()
        if layout != "without a gate" or part != "gate"
    }
    wanted = (
        ktk.load_backend("BF16").moe(**vars(moe.config)).load(stacks.pop("gate", None), **stacks)
    )
    x = torch.randn(5, H).bfloat16()
    ids, w = torch.tensor([[0, 3], [1, 2], [3, 0], [2, 2], [0, 1]]), torch.rand(5, 2)
    got = ktk.MoE.from_checkpoint(new, 0, "BF16", activation=activation)(x, ids, w)
    assert torch.equal(got, wanted(x, ids, w))


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    tensors = files.stacked(files.experts())
    new = files.write(tmp_path / "new.gguf", tensors, arch="newmoe", fields=FEW)
    with pytest.raises(CheckpointError, match=r"'newmoe' has: say it, by activation= \(--activ"):
        ktk.Model.from_checkpoint(new)
    with pytest.raises(CheckpointError, match=r"must be one of .*'cosh'"):
        ktk.Model.from_checkpoint(new, activation="cosh")
    assert describe(new).config.num_experts == E  # looked at all the same
    none = files.write(tmp_path / "none.gguf", tensors, arch="newmoe", fields={})
    with pytest.raises(CheckpointError, match=r"newmoe\.expert_used_count.*by top_k= \(--top-k\)"):
        ktk.Model.from_checkpoint(none, activation="silu")
    model = ktk.Model.from_checkpoint(none, activation="silu", top_k=3)
    assert model[0].config.num_experts_per_tok == 3


def test_the_nearest_names_are_shown(tmp_path: Path) -> None:
    tensors = {f"blk.0.ffn_{part}.weight": one[0] for part, one in files.experts().items()}
    new = files.write(tmp_path / "new.gguf", tensors, arch="newmoe", fields=FEW)
    with open_checkpoint(new) as checkpoint, pytest.raises(CheckpointError) as caught:
        checkpoint.layer(0)
    assert str(caught.value).endswith(
        "layers with experts: none; it has blk.0.ffn_down.weight, blk.0.ffn_gate.weight, "
        "blk.0.ffn_up.weight"
    )


def test_commands_and_conversion_take_it(tmp_path: Path) -> None:
    parts = files.experts()
    new = files.write(tmp_path / "new.gguf", files.stacked(parts), arch="newmoe", fields={})
    run = CliRunner().invoke
    options = ["--activation", "relu", "--top-k", "2"]
    shown = run(app, ["inspect", str(new), "--json", *options])
    found = json.loads(shown.stdout)
    assert found["layers"][0]["activation"] == "relu"
    assert found["bytes_per_token"]["experts"] > 0
    timing = ["--tokens", "1", "--rounds", "1", "--seconds", "0.01", "--rotate", "0.01"]
    for command in (
        ["inspect", str(new), "--escapes"],
        ["verify", str(new)],
        ["demo", "--checkpoint", str(new), "-b", "BF16"],
        ["bench", "--checkpoint", str(new), "-b", "BF16", *timing],
    ):
        done = run(app, [*command, *options])
        assert done.exit_code == 0, done.output
    out = tmp_path / "a[" / "b]"  # "[/b]" would be an error of rich
    out.parent.mkdir()
    made = run(app, ["convert", str(new), str(out), "--backend", "BF16", *options])
    assert made.exit_code == 0, made.output
    assert f"{out}: " in made.output
    x, ids, w = torch.rand(3, H), torch.tensor([[0, 1]] * 3), torch.rand(3, 2)
    converted = ktk.Model.from_checkpoint(out)[0]  # needs no more to be said
    assert converted.config.activation == "relu"
    own = ktk.MoE.from_checkpoint(new, 0, "BF16", activation="relu", top_k=2)
    assert torch.equal(converted(x, ids, w), own(x, ids, w))
    with pytest.raises(CheckpointError, match="were said when it was converted"):
        ktk.Model.from_checkpoint(out, activation="silu")


def test_one_bit_for_a_weight(tmp_path: Path) -> None:
    """Q1_0, which gguf 0.19 names and does not decode: bit 3 of byte 1 is weight 11."""
    rng = np.random.default_rng(0)
    parts = {}
    for part, (n, k) in {"gate": (I, H), "up": (I, H), "down": (H, I)}.items():
        blocks = rng.integers(0, 256, (E, n, k // 128, 18), dtype=np.uint8)
        scales = rng.uniform(0.01, 0.1, (E, n, k // 128, 1)).astype(np.float16)
        blocks[..., :2] = scales.view(np.uint8)
        parts[part] = Tensor(blocks.reshape(E, n, -1), Type.Q1_0)
    path = files.write(tmp_path / "m.gguf", files.stacked(parts))
    with open_checkpoint(path) as checkpoint:
        gate = checkpoint.layer(0).values(1).gate
        assert gate is not None
        got = gate.data
    data = parts["gate"].data[1]
    for row in (0, I - 1):
        for column in range(H):
            block, at = divmod(column, 128)
            raw = data[row, 18 * block : 18 * block + 18]
            d = float(raw[:2].copy().view(np.float16)[0])
            sign = 1 if raw[2 + at // 8] >> at % 8 & 1 else -1
            assert got[row, column] == sign * d
    assert ktk.MoE.from_checkpoint(path, 0).config.num_experts == E
