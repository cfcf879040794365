"""Every family that ktk reads is loaded through transformers: each module finds its own experts."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_families import FAMILIES, MODELS, width_of

from ktk.transformers.layout import is_experts
from ktk.transformers.packed import Packed, packed_of

HIDDEN, INNER, TOKENS = 96, 64, 11
# The privacy filter's own block computes in float32, which bfloat16 products are not as good as.
ALL = {name: one for name, one in (MODELS | FAMILIES).items() if name != "openai-privacy-filter"}


def loaded(name: str, folder: Path, implementation: str, dtype: torch.dtype) -> Any:
    kind = getattr(transformers, ALL[name].made_by)
    return kind.from_pretrained(folder, experts_implementation=implementation, dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_modules_compute_what_they_did(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    made = ALL[name].make(HIDDEN, INNER)
    with torch.no_grad():
        for parameter, one in made.named_parameters():
            if ".experts." in parameter:
                one.normal_(std=HIDDEN**-0.5)
    made.bfloat16().save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING, "ktk"):
        model = loaded(name, tmp_path, "ktk", torch.bfloat16)
    assert not [one.message for one in caplog.records if one.name.startswith("ktk")]
    half = loaded(name, tmp_path, "eager", torch.bfloat16)
    exact = loaded(name, tmp_path, "eager", torch.float32)
    checked = set()
    for where, module in model.named_modules():
        if not is_experts(module):
            continue
        assert isinstance(packed_of(module), Packed)
        x = torch.randn(TOKENS, width_of(exact.get_submodule(where))).bfloat16()
        weights, ids = torch.rand(TOKENS, 6 + getattr(module, "zero_expert_num", 0)).topk(3)
        with torch.no_grad():
            wanted = exact.get_submodule(where)(x.float(), ids, weights)
            stock = half.get_submodule(where)(x, ids, weights.bfloat16())
            got = module(x, ids, weights)
        assert (got.float() - wanted).norm() <= (stock.float() - wanted).norm()
        checked.add(packed_of(module))  # DiffusionGemma's encoder has its decoder's
    assert len(checked) == len(ALL[name].layers)
