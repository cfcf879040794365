"""Families whose files ktk does not read: the refusal names what is missing, and transformers runs.

What `experts_implementation="ktk"` makes of a whole model stands here, too.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_families import VISION, Model, known, width_of

import ktk
from ktk.transformers.layout import is_experts
from ktk.transformers.packed import Packed, packed_of

H, I, TOKENS = 64, 32, 11  # noqa: E741 - the names of the tables


def ernie() -> Any:
    """Make Ernie-4.5-VL, whose file has the experts for text and then those for images."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 6, 4]}
    extra = {"moe_intermediate_size": [I, I // 2], "rope_parameters": rope}
    return Model("Ernie4_5_VLMoeForConditionalGeneration", "", extra=extra).make(H, I)


def muse_spark() -> Any:
    """Make Muse-Spark, whose experts have a norm at the end."""
    text = Model("", "", extra={"moe_hidden_size": 48})
    audio = {"patch_sizes": [2], "hidden_sizes": [8], "depths": [1], "num_hidden_layers": 1}
    config = transformers.MuseSparkConfig(
        text_config=text.options(transformers.MuseSparkTextConfig, H, I),
        vision_config=known(transformers.MuseSparkVisionConfig, VISION),
        audio_config=audio | {"out_hidden_size": H},
        out_hidden_size=4 * VISION["hidden_size"],
        projector_hidden_size=32,
    )
    return transformers.MuseSparkForConditionalGeneration(config)


@dataclass(frozen=True)
class Refused:
    """A family: how to make one, what ktk says of its files, and of the modules, if anything."""

    make: Callable[[], Any]
    sentence: str
    modules: str = ""


CASES = {
    "ernie-4.5-vl": Refused(
        ernie, "moe_intermediate_size is [32, 16]; ktk reads models whose experts are all alike"
    ),
    "muse-spark": Refused(
        muse_spark,
        "the model type 'muse_spark_text' normalises what an expert returns, and ktk adds it up as "
        "it is",
        "3 layers of experts are MuseSparkExperts, whose function of gate and up ktk does not have",
    ),
}


def save(name: str, folder: Path) -> Any:
    torch.manual_seed(0)
    model = CASES[name].make()
    with torch.no_grad():
        for parameter, one in model.named_parameters():
            if ".experts." in parameter:
                one.normal_(std=H**-0.5)
    model.bfloat16().save_pretrained(folder)
    return type(model)


@pytest.mark.parametrize("name", CASES)
def test_the_refusal_names_what_is_missing(name: str, tmp_path: Path) -> None:
    save(name, tmp_path)
    sentence = f"^{tmp_path / 'config.json'}: {re.escape(CASES[name].sentence)}$"
    with pytest.raises(ktk.CheckpointError, match=sentence):
        ktk.Model.from_checkpoint(tmp_path)


@pytest.mark.parametrize("name", CASES)
def test_models_of_transformers_run(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ktk.transformers.modules._said", set())
    kind = save(name, tmp_path)
    with caplog.at_level(logging.WARNING, "ktk"):
        model = kind.from_pretrained(tmp_path, experts_implementation="ktk", dtype=torch.bfloat16)
    assert CASES[name].modules in caplog.text
    options = {"experts_implementation": "eager"}
    half = kind.from_pretrained(tmp_path, dtype=torch.bfloat16, **options)
    exact = kind.from_pretrained(tmp_path, dtype=torch.float32, **options)
    found = [(where, one) for where, one in model.named_modules() if is_experts(one)]
    assert found
    for where, module in found:
        assert isinstance(packed_of(module), Packed) == (not CASES[name].modules)
        x = torch.randn(TOKENS, width_of(exact.get_submodule(where))).bfloat16()
        weights, ids = torch.rand(TOKENS, 6).topk(3)
        with torch.no_grad():
            wanted = exact.get_submodule(where)(x.float(), ids, weights)
            stock = half.get_submodule(where)(x, ids, weights.bfloat16())
            got = module(x, ids, weights)
        assert (got.float() - wanted).norm() <= (stock.float() - wanted).norm()
