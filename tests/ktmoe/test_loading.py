"""Layers from the folders that weight_path names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from ktmoe_layers import INNER, E, H, K, inputs, weights
from safetensors.torch import save_file

import ktk
from ktk import KTMoEWrapper
from ktk.conversion.convert import convert


def checkpoint(folder: Path, seed: int = 0, **more: Any) -> Path:
    """Write one layer as Qwen3-MoE has it."""
    folder.mkdir()
    gate, up, down = weights(seed)
    tensors = {
        f"model.layers.5.mlp.experts.{e}.{name}_proj.weight": matrix[e].clone()
        for e in range(E)
        for name, matrix in (("gate", gate), ("up", up), ("down", down))
    }
    save_file(tensors, folder / "model.safetensors")
    config = {
        "model_type": "qwen3_moe",
        "hidden_act": "silu",
        "num_experts": E,
        "num_experts_per_tok": K,
        "hidden_size": H,
        "moe_intermediate_size": INNER,
        **more,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def layer(path: Path, **options: Any) -> KTMoEWrapper:
    return KTMoEWrapper(
        **{
            "layer_idx": 5,
            "num_experts": E,
            "num_experts_per_tok": K,
            "hidden_size": H,
            "moe_intermediate_size": INNER,
            "gpu_experts_mask": None,
            "cpuinfer_threads": 2,
            "threadpool_count": 2,
            "weight_path": str(path),
            "chunked_prefill_size": 64,
            "method": "BF16",
            **options,
        }
    )


def test_a_checkpoint_is_loaded_through_the_map(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "model")
    order = torch.randperm(E, generator=torch.Generator().manual_seed(1))
    made = layer(path)
    made.load_weights(order)
    moe = ktk.load_backend("BF16").moe(
        num_experts=E, num_experts_per_tok=K, hidden_size=H, intermediate_size=INNER
    )
    moe.load(*(part[order] for part in weights()))
    call = inputs(5)
    assert torch.equal(made.forward(*call), moe(*call))


def test_slots_may_hold_redundant_copies(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "model")
    order = torch.tensor([*range(E), 2, 0])
    made = layer(path, num_experts=E + 2)
    made.load_weights(order)
    moe = ktk.load_backend("BF16").moe(
        num_experts=E + 2, num_experts_per_tok=K, hidden_size=H, intermediate_size=INNER
    )
    moe.load(*(part[order] for part in weights()))
    hidden, ids, scores = inputs(5)
    ids = torch.where(ids == 2, E, ids)  # the copy
    assert torch.equal(made.forward(hidden, ids, scores), moe(hidden, ids, scores))
    with pytest.raises(ValueError, match=rf"map has {E + 2} entries, expected {E}"):
        layer(path).load_weights(order)
    with pytest.raises(ValueError, match=rf"map has {E}, expected 0 <= expert < {E}"):
        layer(path).load_weights(torch.arange(1, E + 1))


@pytest.mark.parametrize("method", ["AMXINT4", "AMXINT8", "MOE_INT8", "MOE_INT4"])
def test_methods_that_quantize_load_the_same_layer(tmp_path: Path, method: str) -> None:
    made = layer(checkpoint(tmp_path / "model"), method=method)
    made.load_weights()
    from_tensors = layer(tmp_path / "model", method=method, layer_idx=6)
    from_tensors.load_weights_from_tensors(*weights(), torch.arange(E))
    call = inputs(5)
    assert torch.equal(made.forward(*call), from_tensors.forward(*call))


@pytest.mark.parametrize(
    ("method", "stored"),
    [("MXFP4", ("ue8m0", 32)), ("NVFP4", ("e4m3", 16)), ("MXFP8", ("ue8m0", 32))],
)
def test_floats_become_what_the_method_names(
    tmp_path: Path, method: str, stored: tuple[str, int]
) -> None:
    made = layer(checkpoint(tmp_path / "model"), method=method)
    made.load_weights()
    assert made.moe is not None
    assert made.moe.format is not None
    assert (made.moe.format.scale, made.moe.format.group_k) == stored


@pytest.mark.parametrize("shards", [1, 3])
def test_weights_are_divided_as_asked(tmp_path: Path, shards: int) -> None:
    made = layer(checkpoint(tmp_path / "model"), method="AMXINT8", shards=shards)
    from_tensors = layer(tmp_path / "model", method="AMXINT8", layer_idx=6, shards=shards)
    made.load_weights()
    from_tensors.load_weights_from_tensors(*weights())
    for one in (made, from_tensors):
        assert one.moe is not None
        assert one.moe.shard_widths == (INNER // shards,) * shards
    call = inputs(5)
    assert torch.equal(made.forward(*call), from_tensors.forward(*call))
    with pytest.raises(ValueError, match="96 can be split into at most 3 shards of 32, not 4"):
        layer(tmp_path / "model", shards=4).load_weights()


def test_parts_of_unlike_numbers_of_experts_are_named(tmp_path: Path) -> None:
    gate, up, down = weights()
    made = layer(tmp_path)
    with pytest.raises(ValueError, match="up_proj has 2 experts, gate_proj has 8"):
        made.load_weights_from_tensors(gate, up[:2], down)
    with pytest.raises(ValueError, match="down_proj has 9 experts, gate_proj has 8"):
        made.load_weights_from_tensors(gate, up, torch.cat([down, down[:1]]))


def test_experts_of_the_gpu_need_not_be_read(tmp_path: Path) -> None:
    mask = torch.arange(E) < 5
    path = checkpoint(tmp_path / "model")
    made = layer(path, gpu_experts_mask=mask, keep_gpu_experts=False)
    made.load_weights()
    assert made.moe is not None
    assert made.moe.nbytes == 3 * made.moe.expert_nbytes
    with pytest.raises(ValueError, match="expert 0 is not loaded"):
        made.submit_write_weight_scale_to_buffer(1, 0, [1], [0], [1], [0])


def test_sizes_that_differ_from_the_checkpoint_are_named(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "model")
    with pytest.raises(ValueError, match=rf"model has hidden_size {H}, the layer was made for 32"):
        layer(path, hidden_size=32).load_weights()
    with pytest.raises(ktk.CheckpointError, match="layer 4"):
        layer(path, layer_idx=4).load_weights()


def test_sizes_are_compared_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint(tmp_path / "model")
    monkeypatch.setattr("ktk.checkpoint.safetensors.layer.SafetensorsLayer.expert", None)
    for sizes in ({"num_experts": E + 1}, {"num_experts": E - 1}, {"num_experts_per_tok": 1}):
        [(name, value)] = sizes.items()
        has = {"num_experts": E, "num_experts_per_tok": K}[name]
        with pytest.raises(ValueError, match=rf"{name} {has}, the layer was made for {value}"):
            layer(path, **sizes).load_weights()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.name.startswith("ktk.ktmoe")]


def test_experts_without_a_slot_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = checkpoint(tmp_path / "model")
    layer(path).load_weights(torch.arange(E))
    assert not warnings(caplog)
    layer(path).load_weights(torch.zeros(E, dtype=torch.long))
    layer(path, num_experts=3).load_weights(torch.tensor([2, 0, 1]))
    first, second = warnings(caplog)
    assert f"puts 7 of the 8 experts of {path} into no slot, the first of them 1" in first
    assert f"puts 5 of the 8 experts of {path} into no slot, the first of them 3" in second


@pytest.mark.parametrize("order", [torch.arange(E) / 2, [[0]] * E, 3])
def test_a_map_that_is_no_list_of_integers_is_refused(tmp_path: Path, order: Any) -> None:
    made = layer(checkpoint(tmp_path / "model"))
    with pytest.raises(TypeError, match="must have one integer for each slot, got"):
        made.load_weights(order)


def test_a_limit_that_is_not_the_checkpoints_is_obeyed_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = checkpoint(tmp_path / "own", swiglu_limit=7.0)
    layer(own).load_weights()
    layer(own, swiglu_limit=7.0).load_weights()
    assert not warnings(caplog)
    made = layer(own, swiglu_limit=0.25)
    made.load_weights()
    assert made.moe is not None
    assert made.moe.config.activation_limit == 0.25
    layer(checkpoint(tmp_path / "plain"), swiglu_limit=7.0, swiglu_alpha=1.5).load_weights()
    first, second = warnings(caplog)
    assert first.endswith(f"swiglu_limit 0.25 for silu, which is obeyed; {own} says silu with 7.0")
    assert second.endswith("plain says silu with no limit")


def test_two_models_of_two_sizes_are_called_in_turns(tmp_path: Path) -> None:
    ours = layer(checkpoint(tmp_path / "ours"))
    ours.load_weights()
    theirs = [
        layer(tmp_path / "theirs", hidden_size=32, layer_idx=n, max_deferred_experts_per_token=d)
        for n, d in ((5, 1), (6, 0))
    ]
    for made in theirs:
        made.load_weights_from_tensors(*weights(7, hidden=32))
    assert theirs[0].model is theirs[1].model is not ours.model
    alone = ours.forward(*inputs(4))
    chained = [made.forward(*inputs(4, hidden=32)) for made in theirs]
    mixed = [theirs[0].forward(*inputs(4, hidden=32))]
    assert torch.equal(ours.forward(*inputs(4)), alone)
    mixed.append(theirs[1].forward(*inputs(4, hidden=32)))
    for one, other in zip(chained, mixed, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("method", ["AMXINT8", "AMXINT4", "BF16"])
def test_a_converted_folder_is_the_checkpoint_it_was_made_of(tmp_path: Path, method: str) -> None:
    path = checkpoint(tmp_path / "model")
    convert(path, tmp_path / "packed", backend=method)
    call = inputs(5)
    results = []
    for source in (path, tmp_path / "packed"):
        made = layer(source, method=method)
        made.load_weights(torch.arange(E))
        results.append(made.forward(*call))
    assert torch.equal(*results)


def test_gguf_is_computed_as_it_is(tmp_path: Path) -> None:
    hidden, inner = 256, 256
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "qwen3moe")
    for name, value in (
        ("expert_count", E),
        ("expert_used_count", K),
        ("embedding_length", hidden),
        ("expert_feed_forward_length", inner),
    ):
        writer.add_uint32(f"qwen3moe.{name}", value)
    values: dict[str, np.ndarray] = {}
    shapes = {"gate": (E, inner, hidden), "up": (E, inner, hidden), "down": (E, hidden, inner)}
    for part, shape in shapes.items():
        random = np.random.default_rng(len(values)).standard_normal(shape, np.float32) / 16
        blocks = gguf.quants.quantize(random, gguf.GGMLQuantizationType.Q8_0)
        values[part] = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0)
        name = f"blk.5.ffn_{part}_exps.weight"
        writer.add_tensor(name, blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    sizes = {"hidden_size": hidden, "moe_intermediate_size": inner}
    made = layer(tmp_path, method="LLAMAFILE", **sizes)
    made.load_weights()
    assert made.moe is not None
    assert str(made.moe.format) == "q8_0"
    for number in (0, E - 1):
        for stored, wanted in zip(made.moe.unpack_expert(number), values.values(), strict=True):
            np.testing.assert_array_equal(stored, wanted[number])
    assert made.forward(*inputs(3, hidden=hidden)).isfinite().all()


def test_experts_are_released_and_loaded_again(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "model")
    order = torch.arange(E).flip(0)
    whole, made = layer(path), layer(path)
    whole.load_weights(order)
    with pytest.raises(RuntimeError, match="release_gpu_experts of layer 5: it has no weights"):
        made.release_gpu_experts()
    made.load_weights(order)
    assert made.moe is not None
    assert made.release_gpu_experts() == 0
    made.gpu_experts_mask[:] = torch.arange(E) < 5
    assert made.release_gpu_experts() == 5 * made.moe.expert_nbytes
    assert made.moe.loaded == (5, 6, 7)
    x, ids, w = inputs(5)
    ids[:] = torch.tensor([4, 6, 7])
    masked = made.forward(x, ids, w)
    whole.gpu_experts_mask[:5] = True
    assert torch.equal(masked, whole.forward(x, ids, w))
    for one in (made, whole):
        one.gpu_experts_mask[3:5] = False
    with pytest.raises(RuntimeError, match=r"layer 5: expert 4 is not loaded \(token 0 wants it\)"):
        made.forward(x, ids, w)
    assert made.load_cpu_experts() == 2
    assert made.load_cpu_experts() == 0
    assert made.moe.loaded == (3, 4, 5, 6, 7)  # type: ignore[comparison-overlap] # it has changed
    assert torch.equal(made.forward(x, ids, w), whole.forward(x, ids, w))


def test_experts_of_tensors_do_not_come_back_from_a_file(tmp_path: Path) -> None:
    """`weight_path` may hold what the weights were before they were updated."""
    order = torch.arange(E).flip(0)
    made = layer(checkpoint(tmp_path / "model"))
    made.load_weights()
    made.load_weights_from_tensors(*weights(1), order)
    assert made.load_cpu_experts() == 0  # none is missing
    whole = made.forward(*inputs(9))
    made.gpu_experts_mask[:5] = True
    made.release_gpu_experts()
    assert made.load_cpu_experts() == 0
    made.gpu_experts_mask[:] = False
    refused = "load_cpu_experts of layer 5: expert 0 .* given as tensors, .* load_weights_from_tens"
    with pytest.raises(RuntimeError, match=refused):
        made.load_cpu_experts()
    assert made.moe is not None
    assert made.moe.loaded == (5, 6, 7)
    made.load_weights_from_tensors(*weights(1), order)
    assert torch.equal(made.forward(*inputs(9)), whole)
    # What is loaded from the file again comes back from there, in its own order.
    made.load_weights(order.roll(1))
    whole = made.forward(*inputs(9))
    made.gpu_experts_mask[:5] = True
    made.release_gpu_experts()
    made.gpu_experts_mask[:] = False
    assert made.load_cpu_experts() == 5
    assert torch.equal(made.forward(*inputs(9)), whole)


def test_experts_that_were_never_loaded_come_when_the_mask_wants_them(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "model")
    whole = layer(path)
    whole.load_weights()
    made = layer(path, gpu_experts_mask=torch.arange(E) < 5, keep_gpu_experts=False)
    made.load_weights()
    made.gpu_experts_mask[:] = False
    assert made.load_cpu_experts() == 5
    call = inputs(9)
    assert torch.equal(made.forward(*call), whole.forward(*call))
    made.gpu_experts_mask[:] = True
    made.release_gpu_experts()
    made.gpu_experts_mask[:] = False
    made.weight_path = None
    with pytest.raises(ValueError, match="load_cpu_experts needs the weight_path that the layer"):
        made.load_cpu_experts()
