"""transformers reads what ``ktk convert --to`` writes, without ktk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from quantized import fp8_everywhere
from safetensors.torch import load_file
from tiny import FAMILIES, INTER, Family, float32

from ktk.checkpoint.safetensors import SafetensorsCheckpoint
from ktk.conversion.compressed import convert_checkpoint

pytest.importorskip("compressed_tensors")


# transformers 5.23 leaves the global scale of nvfp4 experts out.
@pytest.mark.slow
@pytest.mark.parametrize("to", ["int4", "fp8", "mxfp4"])
@pytest.mark.parametrize("family", ["qwen3-moe", "mixtral", "deepseek-v3", "nemotron-h"])
def test_transformers_loads_the_same_values(family: str, to: str, tmp_path: Path) -> None:
    source, output = FAMILIES[family].save(tmp_path / "source"), tmp_path / to
    convert_checkpoint(source, output, to=to)
    auto: Any = transformers.AutoModelForCausalLM
    before = auto.from_pretrained(source).state_dict()
    model, said = auto.from_pretrained(output, output_loading_info=True)
    assert not any(said.values()), said
    after = dict(model.state_dict())
    with SafetensorsCheckpoint(output) as checkpoint:
        for number in checkpoint.layers():
            layer = checkpoint.layer(number)
            experts = [layer.values(e).matrices for e in range(layer.config.num_experts)]
            for part in ("gate_up", "down"):
                [name] = [
                    one
                    for one in before
                    if f"layers.{number}." in one
                    and one.endswith(
                        (f"experts.{part}_proj", f"experts.{part.split('_')[-1]}_proj")
                    )
                ]
                names = ("up",) if name.endswith(".up_proj") else tuple(part.split("_"))
                want = torch.stack([torch.cat([one[n].data for n in names]) for one in experts])
                # The one rounding is that to the model's dtype, by compressed-tensors.
                assert torch.equal(after.pop(name), want.to(before.pop(name).dtype)), name
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor), name


def test_dense_layers_in_codes_are_decoded(tmp_path: Path) -> None:
    """FP8 everywhere, as most are published, becomes int4 for experts and bf16 for the rest."""
    folder = tmp_path / "source"
    folder.mkdir()
    source, exact = fp8_everywhere(folder)
    convert_checkpoint(source, tmp_path / "to", to="int4")
    found, wanted = float32(tmp_path / "to").state_dict(), exact.state_dict()
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        if ".experts." not in name:
            want = wanted[name].bfloat16().to(tensor.dtype)
            assert torch.equal(tensor, want), name


def test_experts_that_share_tensors_are_found_by_their_new_names(tmp_path: Path) -> None:
    """Llama-4's are modules of their own in transformers, where they are compressed."""
    extra = {"intermediate_size": INTER, "interleave_moe_layer_step": 1}
    source = Family("Llama4ForCausalLM", extra).save(tmp_path / "source")
    assert any(name.endswith(".gate_up_proj") for name in load_file(source / "model.safetensors"))
    convert_checkpoint(source, tmp_path / "to", to="int4")
    auto: Any = transformers.AutoModelForCausalLM
    model, said = auto.from_pretrained(tmp_path / "to", output_loading_info=True)
    assert not any(said.values()), said
    found = model.state_dict()
    [file] = (tmp_path / "to").glob("*.safetensors")
    codes = {k: v for k, v in load_file(file).items() if k.endswith("weight_packed")}
    assert len(codes) == 2 * 8 * 3
    assert all(torch.equal(found[name], one) for name, one in codes.items())
