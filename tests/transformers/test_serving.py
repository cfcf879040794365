"""What `ktk serve` runs inside of the server: its loader packs experts, of GGUF files too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf_model
import pytest
import tiny
import torch
from transformers import AutoConfig, PreTrainedModel

from ktk.serving.transformers import switch_on
from ktk.transformers.packed import packed_modules


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the server's loader, with ktk switched on until the test ends."""
    pytest.importorskip("fastapi")
    from transformers.cli.serving.model_manager import ModelManager

    for one in (PreTrainedModel, AutoConfig):
        monkeypatch.setattr(one, "from_pretrained", one.__dict__["from_pretrained"])
    switch_on()
    made = ModelManager(device="cpu")
    yield made
    made.shutdown()


def test_a_gguf_file_stays_in_its_blocks(tmp_path: Path, manager: Any) -> None:
    path, exact = gguf_model.write(tmp_path)
    model, _ = manager.load_model_and_processor(f"{path.parent}@main", gguf_file=path.name)
    backends = {packed.moe.backend.name for packed in packed_modules(model).values()}
    assert backends == {"LLAMAFILE"}
    ids = tiny.tokens()
    with tiny.recorded(exact) as calls:
        expected = tiny.logits(exact, ids)
    with tiny.routed_as(model, calls):  # products of 8 bits may swap two experts that are alike
        got = tiny.logits(model, ids)
    assert torch.nn.functional.cosine_similarity(got, expected, dim=-1).min() > 0.99
