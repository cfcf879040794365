"""Attention on a GPU and experts on the CPU. Skipped where there is no GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf_model
import pytest
import torch
import training
from tiny import load, logits, tokens
from training import (
    ROUNDED,
    act_error,
    forward_error,
    gradients,
    loss_of,
    off_by,
    off_by_token,
    packed,
    randomize,
)

import ktk.sft
import ktk.transformers
from ktk.transformers.dense import packed_linears
from ktk.transformers.packed import packed_modules

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
folder, same_draws = training.folder, training.same_draws


@pytest.fixture
def on_gpu(folder: Path) -> Any:
    return packed(folder, device_map="cuda")


@pytest.mark.parametrize("how", ["stock loading", "ktk.transformers.load", "moved there"])
def test_experts_stay_where_they_are_packed(folder: Path, how: str) -> None:
    ids = tokens()
    wanted = logits(packed(folder), ids)
    if how == "moved there":
        model = packed(folder).cuda()
    elif how == "stock loading":
        model = packed(folder, device_map="cuda")
    else:
        model = ktk.transformers.load(folder, dtype=torch.float32, device_map="cuda")
    assert {one.device.type for one in model.parameters()} == {"cuda"}
    got = logits(model, ids.cuda())
    assert len(packed_modules(model)) == 2
    assert got.is_cuda
    assert off_by_token(got.cpu(), wanted) < forward_error(model)


def test_bf16_models_generate_what_they_score_highest(folder: Path) -> None:
    model = load(folder, experts_implementation="ktk", device_map="cuda")
    ids = tokens().cuda()
    made = [model.generate(ids, max_new_tokens=8, do_sample=False) for _ in range(2)]
    assert torch.equal(*made)
    scores = logits(model, made[0][:, :-1])[:, ids.shape[1] - 1 :]
    chosen = scores.gather(-1, made[0][:, ids.shape[1] :, None])[..., 0]
    # Prompts are multiplied in other blocks than single tokens, which rounds otherwise.
    assert bool((scores.amax(-1) - chosen < 2.0**-5 * scores.abs().amax()).all())


def test_a_side_stream_has_the_same_bits(on_gpu: Any) -> None:
    ids = tokens().cuda()
    wanted = logits(on_gpu, ids)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        got = logits(on_gpu, ids)
    side.synchronize()
    assert torch.equal(got, wanted)


def test_a_captured_decoding_step_reads_its_tokens_again(on_gpu: Any) -> None:
    first, other = (tokens(2, 1, seed).cuda() for seed in (0, 1))
    place = first.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())

    def step() -> torch.Tensor:
        found: torch.Tensor = on_gpu(place, use_cache=False).logits
        return found

    with torch.no_grad():
        with torch.cuda.stream(side):
            step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            out = step()
        replayed = []
        for ids in (first, other, first):
            place.copy_(ids)
            graph.replay()
            torch.cuda.synchronize()
            replayed.append(out.clone())
            # Captured products of matrices may be of other kernels, which round otherwise.
            wanted = on_gpu(ids, use_cache=False).logits
            assert off_by_token(replayed[-1], wanted) < forward_error(on_gpu)
    assert torch.equal(replayed[0], replayed[2])


@pytest.mark.parametrize("family", [gguf_model.QWEN3, gguf_model.TIED, gguf_model.GPT_OSS])
def test_of_gguf_files_all_but_the_experts_is_decoded_there(tmp_path: Path, family: Any) -> None:
    path, _ = gguf_model.write(tmp_path, family)
    ids = tokens()
    wanted = logits(ktk.transformers.load(path, dtype=torch.float32), ids)
    model = ktk.transformers.load(path, dtype=torch.float32, device_map="cuda")
    assert {one.device.type for one in model.parameters()} == {"cuda"}
    assert not packed_linears(model)
    read = ktk.transformers.bytes_per_token(model)
    assert read["gpu"] > 0
    assert {part for part, nbytes in read.items() if nbytes} == {"experts", "gpu"}
    # Blocks of dense layers are multiplied with rounded activations on the CPU.
    rounded = 2 * max(map(act_error, packed_modules(model).values()))
    assert off_by_token(logits(model, ids.cuda()).cpu(), wanted) < forward_error(model) + rounded


def test_gradients_are_those_of_the_cpu(folder: Path, on_gpu: Any) -> None:
    ids = tokens()
    wanted, got = gradients(packed(folder), ids), gradients(on_gpu, ids.cuda())
    assert got.keys() == wanted.keys()
    for name, one in got.items():
        assert one.is_cuda
        assert off_by(one.cpu(), wanted[name]) < ROUNDED, name


def test_attention_and_experts_are_trained_together(folder: Path, on_gpu: Any) -> None:
    peft = pytest.importorskip("peft")
    ids = tokens()
    models = []
    for one in (packed(folder), on_gpu):
        model = peft.get_peft_model(one, peft.LoraConfig(r=2, target_modules=["q_proj"]))
        ktk.sft.add_lora(model, rank=2)
        models.append(model)
    cpu, gpu = models
    values = trained(cpu)
    randomize(list(values.values()))
    for name, one in trained(gpu).items():
        one.data.copy_(values[name])
        assert one.is_cuda == ("experts" not in name), "factors lie where their weights do"
    wanted, got = gradients(cpu, ids), gradients(gpu, ids.cuda())
    assert got.keys() == wanted.keys()
    for name, grad in got.items():
        assert off_by(grad.cpu(), wanted[name]) < ROUNDED, name
    optimizer = torch.optim.AdamW(trained(gpu).values(), 1e-2)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        losses.append(loss_of(gpu, ids.cuda()))
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0] - 0.1, losses


def trained(model: Any) -> dict[str, torch.nn.Parameter]:
    return {name: one for name, one in model.named_parameters() if one.requires_grad}
