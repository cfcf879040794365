"""SGLang's own code loads the folders that `ktk convert --to` writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sglang_checkpoints as checkpoints
import sglang_compressed
import torch
from safetensors.torch import load_file

from ktk.checkpoint.safetensors import SafetensorsCheckpoint
from ktk.conversion.compressed import convert_checkpoint


def int4(layer: Any, stem: str, expert: int) -> torch.Tensor:
    """Return the values of codes, eight of a column in a word, with scales of groups."""
    words = getattr(layer, f"{stem}_weight_packed")[expert].T
    codes = (words[..., None] >> torch.arange(0, 32, 4) & 15).flatten(-2) - 8
    scales = getattr(layer, f"{stem}_weight_scale")[expert].T
    values: torch.Tensor = codes * scales.repeat_interleave(
        codes.shape[1] // scales.shape[1], dim=1
    )
    return values


def fp8(layer: Any, stem: str, expert: int) -> torch.Tensor:
    codes = getattr(layer, f"{stem}_weight")[expert].float()
    values: torch.Tensor = codes * getattr(layer, f"{stem}_weight_scale")[expert]
    return values


@pytest.mark.parametrize(
    ("to", "scheme", "values"),
    [("int4", "CompressedTensorsWNA16MoE", int4), ("fp8", "CompressedTensorsW8A8Fp8MoE", fp8)],
)
def test_experts_are_those_of_the_folder(
    to: str,
    scheme: str,
    values: Callable[[Any, str, int], torch.Tensor],
    mainline: Path,
    patch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    source, output = checkpoints.write(tmp_path / "source", "bf16"), tmp_path / to
    convert_checkpoint(source, output, to=to)
    config = json.loads((output / "config.json").read_text())
    index = json.loads((output / "model.safetensors.index.json").read_text())
    tensors: dict[str, torch.Tensor] = {}
    for file in set(index["weight_map"].values()):
        tensors |= load_file(output / file)
    layer = sglang_compressed.load_experts(patch, mainline, config, tensors)
    assert type(layer.scheme).__name__ == scheme
    with SafetensorsCheckpoint(output) as checkpoint:
        read = checkpoint.layer(1)
        for number in range(checkpoints.E):
            expert = {part: one.data for part, one in read.values(number).matrices.items()}
            joined = torch.cat([expert["gate"], expert["up"]])
            for stem, wanted in (("w13", joined), ("w2", expert["down"])):
                found = values(layer, stem, number)
                assert torch.equal(found, wanted.to(found.dtype)), (stem, number)
