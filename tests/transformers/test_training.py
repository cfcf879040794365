"""Models with packed experts have gradients: of what surrounds experts, and of adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import training
from tiny import FAMILIES, float32, load, logits, recorded, routed_as, tokens
from training import (
    ROUNDED,
    gradients,
    loss_of,
    off_by,
    packed,
    packed_by,
    randomize,
    skipping_what_cannot_run_here,
)

import ktk
import ktk.sft
import ktk.transformers
from ktk.errors import BackendUnsupported

folder, model, same_draws = training.folder, training.model, training.same_draws


@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss", "aria"])
def test_gradients_pass_through_frozen_experts(family: str, tmp_path: Path) -> None:
    folder = FAMILIES[family].save(tmp_path)
    ids = tokens()
    wanted = gradients(float32(folder), ids)
    got = gradients(packed(folder), ids)
    # Weights of packed experts are no parameters, and their biases are frozen.
    assert set(got) == {name for name in wanted if ".experts." not in name}
    for name, one in got.items():
        assert off_by(one, wanted[name]) < ROUNDED, name


def test_dense_layers_have_gradients_too(folder: Path) -> None:
    ids = tokens()
    wanted = gradients(float32(folder), ids)
    got = gradients(packed(folder, quantization_config=_config(linears="BF16", head="BF16")), ids)
    norms = {name for name in wanted if name.endswith("norm.weight")}
    assert norms <= set(got)
    for name in norms:
        assert off_by(got[name], wanted[name]) < ROUNDED, name


def test_adapters_of_packed_dense_layers_have_the_gradients_of_stock_ones(folder: Path) -> None:
    """A model that ktk loads whole, dense layers packed, too, is trained by PEFT as any."""
    peft = pytest.importorskip("peft")
    ids, found = tokens(), []
    for loaded in (float32(folder), packed(folder, quantization_config=_config(linears="BF16"))):
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "o_proj"])
        model = peft.get_peft_model(loaded, config)
        randomize([one for name, one in model.named_parameters() if "lora_" in name])
        found.append({n: one for n, one in gradients(model, ids).items() if "lora_" in n})
    wanted, got = found
    assert len(wanted) == 2 * 2 * 2
    assert got.keys() == wanted.keys()
    for name, one in got.items():
        assert off_by(one, wanted[name]) < ROUNDED, name


def _config(**options: Any) -> Any:
    return ktk.transformers.KtkConfig("BF16", **options)


def test_an_adapter_of_zeros_changes_nothing_and_then_learns(model: Any) -> None:
    ids = tokens()
    before = logits(model, ids)
    for one in model.parameters():
        one.requires_grad_(False)
    factors = ktk.sft.add_lora(model, rank=4, alpha=8)
    assert torch.equal(logits(model, ids), before)
    trained = [one for one in model.parameters() if one.requires_grad]
    assert {id(one) for one in trained} == {id(one) for one in factors}
    assert len(factors) == 2 * 6
    assert {tuple(one.shape) for one in factors} == {
        (8, 4, 128),
        (8, 64, 4),
        (8, 4, 64),
        (8, 128, 4),
    }
    optimizer = torch.optim.AdamW(factors, lr=1e-2)
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        losses.append(loss_of(model, ids))
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.slow
def test_what_is_kept_changes_no_bit(folder: Path) -> None:
    """Neither products that are computed again, nor checkpointing, nor a compiled rest."""
    ids = tokens()
    found = []
    for way in ("kept", "again", "checkpointing", "compiled"):
        model = packed(folder)
        factors = ktk.sft.add_lora(model, rank=4, alpha=8, keep_products=way != "again")
        randomize(factors)
        model.train()
        if way == "checkpointing":
            model.gradient_checkpointing_enable()
        if way == "compiled":
            torch._dynamo.reset()
            model.model.forward = torch.compile(model.model.forward, backend="aot_eager")
        found.append(gradients(model, ids))
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        for name, one in other.items():
            assert torch.equal(one, found[0][name]), name


def test_accumulated_gradients_are_those_of_the_whole_batch(model: Any) -> None:
    factors = ktk.sft.add_lora(model, rank=4)
    randomize(factors)
    ids = tokens(4)
    whole = gradients(model, ids)
    model.zero_grad()
    for half in ids.split(2):
        (loss_of(model, half) / 2).backward()
    for name, one in model.named_parameters():
        if name in whole:
            assert off_by(one.grad, whole[name]) < ROUNDED, name


def test_padding_takes_no_part_in_gradients(model: Any) -> None:
    """A batch of sequences of several lengths has the gradients of each by itself, added up."""
    randomize(ktk.sft.add_lora(model, rank=4))
    lengths = (24, 9, 16)
    rows = [tokens(1, length, seed) for seed, length in enumerate(lengths)]
    separate = [gradients(model, ids) for ids in rows]
    ids, labels = torch.full((3, 24), 3), torch.full((3, 24), -100)
    mask = torch.zeros(3, 24, dtype=torch.long)
    for i, row in enumerate(rows):
        for whole, value in ((ids, row[0]), (labels, row[0]), (mask, torch.ones_like(row[0]))):
            whole[i, : row.shape[1]] = value
    model.zero_grad()
    model(ids, attention_mask=mask, labels=labels).loss.backward()
    parts = [length - 1 for length in lengths]  # of the mean: the first token is predicted by none
    for name, one in model.named_parameters():
        if name not in separate[0]:
            continue
        pairs = zip(parts, separate, strict=True)
        wanted: Any = sum(part / sum(parts) * grads[name] for part, grads in pairs)
        assert off_by(one.grad, wanted) < ROUNDED, name


def test_two_passes_of_one_model_as_preferences_have_them(model: Any) -> None:
    """What a reference computes without gradients leaves those of the other pass alone."""
    factors = ktk.sft.add_lora(model, rank=4)
    randomize(factors)
    chosen, rejected = tokens(seed=1), tokens(seed=2)
    with torch.no_grad():
        margin = loss_of(model, chosen) - loss_of(model, rejected)
    both = loss_of(model, chosen) - loss_of(model, rejected)
    model.zero_grad()
    torch.nn.functional.softplus(both - margin).backward()
    got = [one.grad.clone() for one in factors if one.grad is not None]
    assert len(got) == len(factors)
    separate = [gradients(model, ids) for ids in (chosen, rejected)]
    named = {id(one): name for name, one in model.named_parameters()}
    for one, grad in zip(factors, got, strict=True):
        name = named[id(one)]
        wanted = 0.5 * (separate[0][name] - separate[1][name])
        scale = separate[0][name].norm() + separate[1][name].norm()
        assert (grad - wanted).norm() <= 1e-5 * scale


def test_bf16_models_have_the_gradients_of_f32(folder: Path) -> None:
    """Of the same weights, factors and tokens, sent to the same experts."""
    ids = tokens()
    half = load(folder, dtype=torch.bfloat16, experts_implementation="ktk")
    randomize(ktk.sft.add_lora(half, rank=4, dtype=torch.bfloat16))
    whole = packed(folder)
    ktk.sft.add_lora(whole, rank=4)
    for one, other in zip(whole.parameters(), half.parameters(), strict=True):
        one.data.copy_(other.data)
    with recorded(whole) as calls:
        logits(whole, ids)
    with routed_as(whole, calls):
        wanted = gradients(whole, ids)
    with routed_as(half, calls):
        got = gradients(half, ids)
    assert got.keys() == wanted.keys()
    factors = [name for name in got if "_lora_" in name]
    assert len(factors) == 12
    for name in factors:
        assert got[name].dtype == torch.bfloat16
        assert off_by(got[name].float(), wanted[name]) < _bf16_error(layers=2), name


def _bf16_error(layers: int) -> float:
    """Bound how far bf16 hidden states take the gradient of a factor, relative.

    Of a layer, 16 roundings stand one behind the other: 4 of the norms before its halves, which
    round before and after their weight; 1 of projections, 2 of norms of queries and keys, 3 of
    rotations (two products and the sum), 2 of attention (probabilities and the output), 1 of its
    projection, 1 of experts, and 2 of residuals. The last norm and the head have 3. A gradient
    passes as many on the way back, and hangs on those of the way there twice: it begins with the
    probabilities of tokens, and is multiplied with what was kept. Both models have the 16 of
    `training.ROUNDED` as well. Each is 2^-9 as the root of the mean square; roundings know nothing
    of each other, so their squares add up.
    """
    there = 16 * layers + 3
    return float((3 * there + 2 * 16) ** 0.5 * 2.0**-9)


@pytest.mark.parametrize("backend", ["AMXINT8", "AMXINT4", "FP8"])
def test_quantized_experts_train_and_do_not_merge(folder: Path, backend: str) -> None:
    model = packed_by(backend, folder)
    factors = ktk.sft.add_lora(model, rank=4)
    first = loss_of(model, tokens())
    optimizer = torch.optim.AdamW(factors, lr=1e-2)
    for _ in range(4):
        gradients(model, tokens())
        optimizer.step()
    assert loss_of(model, tokens()) < first
    with pytest.raises(ValueError, match=f"packed for {backend}, in codes"):
        ktk.sft.merge(model)


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (BackendUnsupported("this CPU lacks AMX"), pytest.skip.Exception),
        (ktk.BackendError("planted"), ktk.BackendError),
        (ktk.CheckpointError("planted"), ktk.CheckpointError),
    ],
    ids=lambda one: type(one).__name__ if isinstance(one, Exception) else "",
)
def test_what_cannot_run_is_skipped_and_faults_are_not(
    error: Exception, raised: type[BaseException]
) -> None:
    # Not by pytest.raises: a skip where an error is wanted would skip this test.
    caught: BaseException | None = None
    try:
        with skipping_what_cannot_run_here():
            raise error
    except BaseException as one:
        caught = one
    assert type(caught) is raised
