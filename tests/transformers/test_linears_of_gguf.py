"""Dense layers of GGUF files stay in the blocks that they are stored in."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf_model
import numpy as np
import pytest
import tiny
import torch
from dense_layers import check_linears

import ktk
import ktk.transformers
from ktk.transformers import blocks, quantizer
from ktk.transformers.dense import packed_linears


@pytest.fixture(params=["QWEN3", "TIED", "GPT_OSS"])  # which has biases
def gguf_file(request: Any, tmp_path: Path) -> tuple[Path, Any]:
    """Write a GGUF file; return it, and the model in float32 that its blocks mean."""
    return gguf_model.write(tmp_path, getattr(gguf_model, request.param))


@pytest.mark.slow
def test_matrices_of_a_gguf_file_stay_in_their_blocks(gguf_file: tuple[Path, Any]) -> None:
    path, exact = gguf_file
    model = ktk.transformers.load(path, dtype=torch.float32)
    linears = packed_linears(model)
    assert len(linears) == 9
    assert {one.linear.backend.name for one in linears.values()} == {"LLAMAFILE"}
    for name, one in linears.items():
        assert torch.equal(torch.from_numpy(one.linear.unpack()), exact.get_submodule(name).weight)
        assert 34 / 32 <= one.linear.nbytes / one.linear.unpack().size < 1.1  # Q8_0
    wide = {name for name, one in model.named_parameters() if one.ndim > 1}
    assert {name.split(".", 3)[-1] for name in wide} <= {
        *("mlp.gate.weight", "mlp.router.weight"),
        *("mlp.experts.gate_up_proj_bias", "mlp.experts.down_proj_bias"),
    }
    ids = tiny.tokens()
    embedding = model.get_input_embeddings()
    assert torch.equal(embedding(ids), exact.get_input_embeddings()(ids))
    assert (embedding.layer is model.lm_head.layer) == exact.config.tie_word_embeddings
    check_linears(model, ids)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["iq4_ks", "iq6_k", "iq4_kt"])
def test_types_of_ik_llama_cpp_stay_in_their_blocks(tmp_path: Path, kind: str) -> None:
    """With a scale in front of each row, and without; the router's matrix is decoded."""
    path, exact = gguf_model.write(tmp_path, dense=kind)
    model = ktk.transformers.load(path, dtype=torch.float32)
    linears = packed_linears(model)
    assert len(linears) == 9
    for name, one in linears.items():
        assert one.linear.formats[0] == ktk.Format(kind)
        assert torch.equal(torch.from_numpy(one.linear.unpack()), exact.get_submodule(name).weight)
    ids = tiny.tokens()
    embedding = model.get_input_embeddings()
    assert torch.equal(embedding(ids), exact.get_input_embeddings()(ids))
    for name, router in exact.named_parameters():
        if name.endswith("mlp.gate.weight"):
            assert torch.equal(model.get_parameter(name), router)
    check_linears(model, ids)


@pytest.mark.slow
def test_beside_a_gpu_only_what_is_asked_for_is_packed(
    gguf_file: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, exact = gguf_file
    monkeypatch.setattr(quantizer, "on_cpu", lambda device_map: False)
    model = ktk.transformers.load(path, dtype=torch.float32)
    assert not packed_linears(model)
    assert type(model.get_input_embeddings()) is torch.nn.Embedding
    for name, one in exact.named_parameters():
        if ".experts." not in name:
            assert torch.equal(model.get_parameter(name), one), name
    assert set(packed_linears(ktk.transformers.load(path, head="LLAMAFILE"))) == {"lm_head"}


@pytest.mark.slow
def test_a_gguf_file_may_be_requantized_if_that_is_asked_for(gguf_file: tuple[Path, Any]) -> None:
    path, exact = gguf_file
    model = ktk.transformers.load(path, linears="AMXINT8", head="BF16")
    found = {name: one.linear.backend.name for name, one in packed_linears(model).items()}
    assert found.pop("lm_head") == "BF16"
    assert set(found.values()) == {"AMXINT8"}
    wanted = exact.lm_head.weight.bfloat16().float()
    assert torch.equal(torch.from_numpy(model.lm_head.layer.linear.unpack()), wanted)


def test_rows_that_transformers_rearranges_are_rearranged_as_blocks() -> None:
    from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor

    processor = LlamaTensorProcessor({"num_attention_heads": 4, "num_key_value_heads": 2})
    values = np.random.default_rng(0).normal(size=(32, 64)).astype(np.float32)
    for name in ("blk.0.attn_q.weight", "blk.0.attn_k.weight", "blk.0.attn_v.weight"):
        order = blocks._order(processor, name, values.shape, {})
        wanted = processor.process(values, name).weights
        assert (order is None) == ("attn_v" in name)
        assert np.array_equal(values if order is None else values[order], wanted)


@pytest.mark.parametrize(
    "change", [lambda w: w + 1, lambda w: w.T, lambda w: w[:, ::-1], lambda w: np.sort(w, 0)[::2]]
)
def test_matrices_of_which_values_change_are_decoded(change: Any) -> None:
    class Processor:
        def process(self, weights: Any, name: str, **rest: Any) -> Any:
            return SimpleNamespace(name=name, weights=change(weights))

    with pytest.raises(blocks._OtherValuesError):
        blocks._order(Processor(), "blk.0.attn_q.weight", (8, 8), {})
