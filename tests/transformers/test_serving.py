"""What `ktk serve` runs inside of the server: its loader packs experts, of GGUF files too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import gguf_model
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from ktk.errors import CheckpointError
from ktk.serving.transformers import switch_on
from ktk.transformers.packed import packed_modules


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the server's loader, with ktk switched on until the test ends."""
    pytest.importorskip("fastapi")
    from transformers.cli.serving.model_manager import ModelManager

    for one in (PreTrainedModel, AutoConfig, AutoTokenizer):
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


def test_gpt_oss_with_stretched_rope_is_served(tmp_path: Path, manager: Any) -> None:
    """transformers' own reading of these keys ends in an error, of the tokenizer, too."""

    def yarn(writer: Any) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(8.0)
        writer.add_rope_scaling_orig_ctx_len(4096)

    path, _ = gguf_model.write(tmp_path, gguf_model.GPT_OSS, metadata=yarn)
    model, _ = manager.load_model_and_processor(f"{path.parent}@main", gguf_file=path.name)
    assert model.config.rope_parameters["factor"] == 8.0


def test_a_model_that_lacks_a_tensor_is_not_served(tmp_path: Path, manager: Any) -> None:
    """transformers itself would fill it with random numbers, and go on."""
    tiny.FAMILIES["qwen3-moe"].save(tmp_path)
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    auto: Any = AutoModelForCausalLM
    with pytest.raises(CheckpointError, match=f"{tmp_path.name} lacks {name}, which config.json"):
        auto.from_pretrained(tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=r"is damaged or truncated: .* Download it again"):
        auto.from_pretrained(tmp_path)
