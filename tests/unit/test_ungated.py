"""Experts without a gate: what a layer takes and refuses, and what files say of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import ktk
from ktk.checkpoint import describe
from ktk.cli import app
from ktk.cli.contents import LayerReport
from ktk.cli.training import training_memory
from ktk.expert import Expert, Matrix
from ktk.testing.reference import Expert as Exact
from ktk.testing.reference import layer

E, K, H, I = 4, 2, 64, 96  # noqa: E741 - the names of the table of families


def made(**options: Any) -> ktk.MoE:
    sizes: dict[str, Any] = {
        "num_experts": E,
        "num_experts_per_tok": K,
        "hidden_size": H,
        "intermediate_size": I,
    }
    return ktk.load_backend("BF16").moe(**sizes, activation="relu2", gated=False, **options)


def weights() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(E, I, H).bfloat16(), torch.randn(E, H, I).bfloat16()


def test_a_layer_without_gate_takes_no_memory_for_one() -> None:
    up, down = weights()
    moe = made().load(None, up, down)
    assert moe.nbytes * 3 == gated().nbytes * 2
    gate, *others = moe.unpack_expert(1)
    assert gate is None
    assert np.array_equal(others[0], up[1].float())
    assert np.array_equal(others[1], down[1].float())


def gated() -> ktk.MoE:
    up, down = weights()
    sizes: dict[str, Any] = {
        "num_experts": E,
        "num_experts_per_tok": K,
        "hidden_size": H,
        "intermediate_size": I,
    }
    return ktk.load_backend("BF16").moe(**sizes, activation="relu2").load(up, up, down)


def test_a_gate_is_given_just_where_there_is_one() -> None:
    up, down = weights()
    expert = Expert(up=Matrix(None, up[0]), down=Matrix(None, down[0]))
    with pytest.raises(TypeError, match=r"have no gate \(gated=False\): gate must be None"):
        made().load(up, up, down)
    with pytest.raises(TypeError, match=r"have no gate \(gated=False\): gate must be None"):
        made().load_expert(0, up[0], up[0], down[0])
    with pytest.raises(TypeError, match="have no gate"):
        made().load_expert(0, None, up[0], down[0], gate_bias=torch.zeros(I))
    with pytest.raises(TypeError, match="up is missing: give up and down, or an Expert"):
        made().load_expert(0, down=down[0])
    with pytest.raises(TypeError, match="gate is missing"):
        gated().load(None, up, down)
    with pytest.raises(TypeError, match="gate is missing"):
        gated().load_expert(0, expert)
    made().load_expert(0, expert)


def test_an_expert_is_left_out_by_its_up() -> None:
    up, down = weights()
    moe = made().load(None, [up[0], None, up[2], up[3]], down)
    assert moe.loaded == (0, 2, 3)


def test_training_takes_memory_for_two_matrices() -> None:
    sizes: dict[str, Any] = {"num_experts": E, "num_experts_per_tok": K}
    sizes |= {"hidden_size": H, "intermediate_size": I}
    report = LayerReport(0, **sizes, gated=False)
    memory = training_memory([report], rank=4)
    assert memory.factors == 2 * E * 4 * (H + I) * 4
    assert memory.products_per_token == K * (I * 2 + 4 * 4)


def test_an_adapter_has_no_gate_either() -> None:
    moe = made().load(None, *weights())
    lora = ktk.Lora(gate_a=torch.zeros(E, 4, H), gate_b=torch.zeros(E, I, 4))
    ids = torch.zeros(3, K, dtype=torch.int32)
    with pytest.raises(ValueError, match="experts without a gate have no factors of one"):
        moe(torch.zeros(3, H), ids, torch.ones(3, K), lora=lora)


@pytest.mark.parametrize("latent", [None, 32])
def test_nemotron_is_read_as_published(tmp_path: Path, latent: int | None) -> None:
    """As NVIDIA names its tensors, and with the width that experts have inside the model."""
    torch.manual_seed(1)
    hidden = latent or H
    tensors = {
        f"backbone.layers.1.mixer.experts.{e}.{part}_proj.weight": torch.randn(shape).bfloat16()
        for e in range(E)
        for part, shape in (("up", (I, hidden)), ("down", (hidden, I)))
    }
    tensors["backbone.layers.1.mixer.shared_experts.up_proj.weight"] = torch.zeros(I, H).bfloat16()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(
        f'{{"model_type": "nemotron_h", "hidden_size": {H}, "moe_latent_size": '
        f'{latent or "null"}, "n_routed_experts": {E}, "num_experts_per_tok": {K}, '
        f'"intermediate_size": 7, "moe_intermediate_size": {I}, "mlp_hidden_act": "relu2", '
        '"mamba_hidden_act": "silu"}'
    )
    told = f"experts are {latent} wide, the model {H}: the caller projects"
    assert (told in str(describe(tmp_path))) == bool(latent)
    result = CliRunner().invoke(app, ["inspect", str(tmp_path)], env={"COLUMNS": "200"})
    assert (f"The {told}." in result.output) == bool(latent), result.output
    moe = ktk.MoE.from_checkpoint(tmp_path, 1)
    config = moe.config
    assert (config.gated, config.activation, config.hidden_size) == (False, "relu2", hidden)
    x, ids = torch.randn(5, hidden), torch.randint(0, E, (5, K))
    factors = torch.rand(5, K)

    def exact(number: int) -> Exact:
        stem = f"backbone.layers.1.mixer.experts.{number}."
        return Exact.of({part: tensors[f"{stem}{part}_proj.weight"] for part in ("up", "down")})

    wanted = layer(x, ids, factors, exact, config)
    error = np.linalg.norm(moe(x, ids, factors).numpy() - wanted) / np.linalg.norm(wanted)
    assert error < 2**-8  # activations in bf16, twice, of which one is squared
