"""What ktk reads of a GGUF file's metadata, where transformers does not, or not right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import gguf_model
import pytest
import tiny
import torch
from dense_layers import check_linears

import ktk.transformers
from ktk.errors import CheckpointError
from ktk.transformers.gguf_config import _stretched, config_of
from ktk.transformers.gguf_metadata import read_once

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "factor": 4.0}


def stretched(rope: dict[str, Any]) -> tiny.Family:
    extra = {**gguf_model.QWEN3.extra, "rope_parameters": {"rope_theta": 1e4, **rope}}
    return tiny.Family("Qwen3MoeForCausalLM", extra)


def write_yarn(writer: Any) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(64)


def write_factor(writer: Any) -> None:
    writer.add_rope_scaling_factor(4.0)  # linear, where no type is named


def write_gpt_oss(writer: Any) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(32.0)
    writer.add_rope_scaling_orig_ctx_len(4096)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "metadata"),
    [
        (stretched(YARN), write_yarn),
        (stretched(LINEAR), write_factor),
        (gguf_model.GPT_OSS, write_gpt_oss),
    ],
    ids=["yarn", "linear", "gpt-oss"],
)
def test_rope_is_stretched(tmp_path: Path, family: tiny.Family, metadata: Any) -> None:
    path, exact = gguf_model.write(tmp_path, family, metadata=metadata)
    model = ktk.transformers.load(path, dtype=torch.float32)
    assert model.config.rope_parameters == exact.config.rope_parameters
    found, wanted = model.model.rotary_emb, exact.model.rotary_emb
    assert torch.equal(found.inv_freq, wanted.inv_freq)
    assert found.attention_scaling == wanted.attention_scaling
    check_linears(model, tiny.tokens())


def config(folder: Path, architecture: str, metadata: Any) -> Any:
    """Write a file of metadata alone, and read its configuration."""
    writer = gguf.GGUFWriter(folder / "model.gguf", architecture)
    writer.add_block_count(1)
    writer.add_rope_freq_base(1e4)
    metadata(writer)
    gguf_model.add_tokenizer(writer, 512)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with read_once():
        return config_of(str(folder), "model.gguf")


def test_widths_of_experts(tmp_path: Path) -> None:
    def widths(writer: Any) -> None:
        writer.add_expert_feed_forward_length(96)
        writer.add_expert_shared_feed_forward_length(160)

    found = config(tmp_path, "qwen2moe", widths)
    assert (found.moe_intermediate_size, found.shared_expert_intermediate_size) == (96, 160)
    assert found.rope_parameters["rope_type"] == "default"


def test_factors_of_yarn(tmp_path: Path) -> None:
    def yarn(writer: Any) -> None:
        write_yarn(writer)
        writer.add_float32("qwen3moe.rope.scaling.attn_factor", 0.5)
        writer.add_float32("qwen3moe.rope.scaling.yarn_beta_fast", 16.0)

    found = config(tmp_path, "qwen3moe", yarn).rope_parameters
    assert found["attention_factor"] == pytest.approx(0.5 * (1 + 0.1 * 1.3862943611198906))
    assert {**YARN, "beta_fast": 16.0}.items() <= found.items()


def test_what_is_not_about_lengths_stays(tmp_path: Path) -> None:
    def part(writer: Any) -> None:
        writer.add_rope_dimension_count(32)
        writer.add_key_length(64)
        writer.add_head_count(4)
        writer.add_embedding_length(256)
        for add in (writer.add_rope_scaling_factor, writer.add_layer_norm_rms_eps):
            add(2.0)

    found = config(tmp_path, "minimax-m2", part).rope_parameters
    assert (found["rope_type"], found["factor"]) == ("linear", 2.0)
    assert found["partial_rotary_factor"] == 0.5


def test_kinds_of_layers_that_slide_are_not_stretched() -> None:
    known = {"sliding_attention": {"rope_theta": 1e4}, "full_attention": {"rope_theta": 1e6}}
    assert _stretched(known, LINEAR) == {
        "sliding_attention": {"rope_theta": 1e4},
        "full_attention": {"rope_theta": 1e6, **LINEAR},
    }


@pytest.mark.slow
def test_options_of_the_configuration_reach_it(tmp_path: Path) -> None:
    path, _ = gguf_model.write(tmp_path)
    model = ktk.transformers.load(path, use_cache=False, num_experts_per_tok=1)
    assert (model.config.use_cache, model.config.num_experts_per_tok) == (False, 1)


def test_other_kinds_are_refused(tmp_path: Path) -> None:
    def long(writer: Any) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)

    with pytest.raises(CheckpointError, match=r"model\.gguf wants RoPE stretched by 'longrope'"):
        config(tmp_path, "qwen3moe", long)


@pytest.mark.slow
def test_wrong_metadata_are_named(tmp_path: Path) -> None:
    def heads(writer: Any) -> None:
        writer.kv_data[0]["qwen3moe.attention.head_count_kv"].value = 4

    path, _ = gguf_model.write(tmp_path, metadata=heads)
    with pytest.raises(CheckpointError, match=r"attn_k\.weight has shape .* metadata want"):
        ktk.transformers.load(path)
