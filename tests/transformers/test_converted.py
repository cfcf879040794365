"""transformers reads what ``ktk convert --to`` writes, without ktk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from tiny import FAMILIES

from ktk.checkpoint.safetensors import SafetensorsCheckpoint
from ktk.conversion.compressed import convert_checkpoint

pytest.importorskip("compressed_tensors")


# transformers 5.23 leaves the global scale of nvfp4 experts out.
@pytest.mark.parametrize("to", ["int4", "fp8", "mxfp4"])
@pytest.mark.parametrize("family", ["qwen3-moe", "mixtral", "deepseek-v3", "nemotron-h"])
def test_transformers_loads_the_same_values(family: str, to: str, tmp_path: Path) -> None:
    source, output = FAMILIES[family].save(tmp_path / "source"), tmp_path / to
    convert_checkpoint(source, output, to=to)
    auto = transformers.AutoModelForCausalLM
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
