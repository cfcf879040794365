"""Models with packed experts train: by themselves, with PEFT, and with adapters of experts."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny import FAMILIES, float32, load, logits, tokens

import ktk
import ktk.sft
import ktk.transformers
from ktk.transformers.packed import packed_modules

ROOT = Path(__file__).parents[2]
#: The outputs of two layers of experts depend on two roundings of activations each, to 8 bits: an
#: error of half a unit at most. Products of int8 have codes of up to 127 steps for the largest of a
#: row, which is no more than 6 times the root of the mean square here, uniform within half a step.
FORWARD = {"BF16": 4 * 2.0**-9, "AMXINT8": 4 * 6 / 254 / 3**0.5}
#: A gradient passes some ten roundings to bf16 on its way through two layers of experts: products
#: that are kept, and three operands of either half. Each is half a unit of 8 bits at most.
ROUNDED = 16 * 2.0**-8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FAMILIES["qwen3-moe"].save(tmp_path_factory.mktemp("qwen3-moe"))


@pytest.fixture
def model(folder: Path) -> Any:
    return packed(folder)


def packed(folder: Path, **options: Any) -> Any:
    return load(folder, dtype=torch.float32, experts_implementation="ktk", **options)


def randomize(parameters: list[torch.nn.Parameter], seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for one in parameters:
        one.data.normal_(std=0.1, generator=generator)


def loss_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(ids, labels=ids).loss
    return loss


def gradients(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss_of(model, ids).backward()
    return {n: one.grad.clone() for n, one in model.named_parameters() if one.grad is not None}


def off_by(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm())


def off_by_token(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the median of all tokens: a rounding may send one to another expert, on a tie."""
    return float(((got - wanted).norm(dim=-1) / wanted.norm(dim=-1)).median())


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
        wanted = sum(part / sum(parts) * grads[name] for part, grads in pairs)
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
    got = [one.grad.clone() for one in factors]
    separate = [gradients(model, ids) for ids in (chosen, rejected)]
    named = {id(one): name for name, one in model.named_parameters()}
    for one, grad in zip(factors, got, strict=True):
        name = named[id(one)]
        wanted = 0.5 * (separate[0][name] - separate[1][name])
        scale = separate[0][name].norm() + separate[1][name].norm()
        assert (grad - wanted).norm() <= 1e-5 * scale


def test_bf16_models_train(folder: Path) -> None:
    model = load(folder, dtype=torch.bfloat16, experts_implementation="ktk")
    factors = ktk.sft.add_lora(model, rank=4, dtype=torch.bfloat16)
    randomize(factors)
    got = gradients(model, tokens())
    names = [name for name in got if "_lora_" in name]
    assert len(names) == 12
    assert all(got[name].dtype == torch.bfloat16 and got[name].isfinite().all() for name in names)


@pytest.mark.parametrize("layout", ["peft", "peft-fused", "kt"])
def test_adapters_are_read_as_they_were_written(folder: Path, tmp_path: Path, layout: str) -> None:
    model, ids = packed(folder), tokens()
    randomize(ktk.sft.add_lora(model, rank=4, alpha=8))
    wanted = logits(model, ids)
    ktk.sft.save_adapter(model, tmp_path, layout)
    other = packed(folder)
    ktk.sft.load_adapter(other, tmp_path)
    # Zeros that stand in a layout change no sum.
    assert torch.equal(logits(other, ids), wanted)


def test_adapters_have_the_names_that_others_know(folder: Path, tmp_path: Path) -> None:
    from safetensors import safe_open

    model = packed(folder)
    ktk.sft.add_lora(model, rank=4, alpha=8, targets=("gate", "down"))
    keys = {}
    for layout, name in (("peft", "adapter_model"), ("kt", "fused_expert_lora")):
        ktk.sft.save_adapter(model, tmp_path / layout, layout)
        with safe_open(tmp_path / layout / f"{name}.safetensors", "pt") as file:
            keys[layout] = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    prefix = "base_model.model.model.layers.1.mlp.experts.7"
    assert keys["peft"][f"{prefix}.gate_proj.lora_A.weight"] == (4, 128)
    assert keys["peft"][f"{prefix}.down_proj.lora_B.weight"] == (128, 4)
    assert len(keys["peft"]) == 2 * 8 * 4
    assert keys["kt"]["layers.0.experts.down_lora_a"] == (8, 4, 64)
    assert len(keys["kt"]) == 2 * 4
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 8)
    assert config["target_modules"] == ["down_proj", "gate_proj"]


@pytest.mark.parametrize("backend", list(FORWARD))
def test_trained_adapters_go_to_stock_transformers(
    folder: Path, tmp_path: Path, backend: str
) -> None:
    """PEFT adds them to the same weights as floats, and computes the same logits."""
    peft = pytest.importorskip("peft")
    ids = tokens()
    try:
        model = packed(folder, quantization_config=ktk.transformers.KtkConfig(backend))
    except ktk.BackendError as error:
        pytest.skip(str(error))
    stock = float32(folder)
    for name, one in packed_modules(model).items():
        module = stock.get_submodule(name)
        for expert in range(one.moe.config.num_experts):
            gate, up, down = map(torch.from_numpy, one.moe.unpack_expert(expert))
            module.gate_up_proj.data[expert] = torch.cat([gate, up])
            module.down_proj.data[expert] = down
    optimizer = torch.optim.AdamW(ktk.sft.add_lora(model, rank=4, alpha=8), lr=2e-2)
    for _ in range(8):
        gradients(model, ids)
        optimizer.step()
    before = logits(stock, ids)
    ktk.sft.save_adapter(model, tmp_path, "peft-fused")
    stock = peft.PeftModel.from_pretrained(stock, str(tmp_path))
    assert off_by_token(logits(model, ids), before) > 4 * FORWARD[backend]
    assert off_by_token(logits(model, ids), logits(stock, ids)) < FORWARD[backend]


def test_adapters_come_from_peft(folder: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    ids = tokens()
    tensors = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=[], target_parameters=tensors)
    trained = peft.get_peft_model(float32(folder), config)
    randomize([one for name, one in trained.named_parameters() if "lora_" in name])
    trained.save_pretrained(tmp_path)
    model = packed(folder)
    assert off_by_token(logits(model, ids), logits(trained, ids)) > 4 * FORWARD["BF16"]
    ktk.sft.load_adapter(model, tmp_path)
    assert off_by_token(logits(model, ids), logits(trained, ids)) < FORWARD["BF16"]


def test_peft_trains_attention_beside_adapters_of_experts(folder: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(packed(folder), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    factors = ktk.sft.add_lora(model, rank=2)
    randomize(factors)
    got = gradients(model, tokens())
    assert {name.rpartition(".")[2] for name in got if "experts" in name} == {
        f"{part}_lora_{side}" for part in ("gate", "up", "down") for side in "ab"
    }
    assert any("q_proj.lora_B" in name for name in got)
    assert all("lora_" in name for name in got)
    model.save_pretrained(tmp_path / "attention")
    ktk.sft.save_adapter(model, tmp_path / "experts")
    other = peft.PeftModel.from_pretrained(packed(folder), str(tmp_path / "attention"))
    ktk.sft.load_adapter(other, tmp_path / "experts")
    assert torch.equal(logits(other, tokens()), logits(model, tokens()))


def test_merged_experts_are_saved_and_loaded(folder: Path, tmp_path: Path) -> None:
    model, ids = packed(folder), tokens()
    randomize(ktk.sft.add_lora(model, rank=4, alpha=8))
    wanted = logits(model, ids)
    ktk.sft.merge(model)
    assert not any("_lora_" in name for name, _ in model.named_parameters())
    # Sums are rounded to bf16 once more, and so is nothing else.
    assert 0 < off_by(logits(model, ids), wanted) < ROUNDED
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(packed(tmp_path), ids), logits(model, ids))


@pytest.mark.parametrize("backend", ["AMXINT8", "AMXINT4", "FP8"])
def test_quantized_experts_train_and_do_not_merge(folder: Path, backend: str) -> None:
    config = ktk.transformers.KtkConfig(backend)
    try:
        model = packed(folder, quantization_config=config)
    except (ktk.BackendError, ktk.CheckpointError) as error:
        pytest.skip(str(error))
    factors = ktk.sft.add_lora(model, rank=4)
    first = loss_of(model, tokens())
    optimizer = torch.optim.AdamW(factors, lr=1e-2)
    for _ in range(4):
        gradients(model, tokens())
        optimizer.step()
    assert loss_of(model, tokens()) < first
    with pytest.raises(ValueError, match=f"packed for {backend}, in codes"):
        ktk.sft.merge(model)


def test_what_makes_no_sense_is_refused(folder: Path, model: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="rank must be at least 1, got 0"):
        ktk.sft.add_lora(model, rank=0)
    with pytest.raises(ValueError, match="targets must be some of gate, up, down"):
        ktk.sft.add_lora(model, targets=["router"])
    with pytest.raises(ValueError, match=r"call ktk\.sft\.add_lora"):
        ktk.sft.save_adapter(model, tmp_path)
    with pytest.raises(ValueError, match=r"call ktk\.transformers\.pack"):
        ktk.sft.add_lora(float32(folder))
    with pytest.raises(FileNotFoundError, match="has neither"):
        ktk.sft.load_adapter(model, tmp_path)
    ktk.sft.add_lora(model, rank=2)
    with pytest.raises(ValueError, match=re.escape("remove it by remove_lora(model)")):
        ktk.sft.add_lora(model, rank=2)
    ktk.sft.save_adapter(model, tmp_path)
    ktk.sft.remove_lora(model)
    other = FAMILIES["mixtral"].save(tmp_path / "mixtral")
    with pytest.raises(ValueError, match="has no factors of this model's experts"):
        ktk.sft.load_adapter(
            load(other, dtype=torch.float32, experts_implementation="ktk"), _renamed(tmp_path)
        )


def _renamed(folder: Path) -> Path:
    """Give tensors of an adapter names that no model has."""
    from safetensors.torch import load_file, save_file

    path = folder / "adapter_model.safetensors"
    save_file({f"x.{name}": one for name, one in load_file(path).items()}, path)
    return folder


def test_copies_of_a_model_share_experts_and_not_adapters(model: Any) -> None:
    randomize(ktk.sft.add_lora(model, rank=2))
    other = copy.deepcopy(model)
    pairs = zip(packed_modules(model).values(), packed_modules(other).values(), strict=True)
    assert all(mine is theirs for mine, theirs in pairs)
    assert torch.equal(logits(other, tokens()), logits(model, tokens()))
    ktk.sft.remove_lora(other)
    assert not torch.equal(logits(other, tokens()), logits(model, tokens()))


@pytest.mark.slow
def test_two_ranks_average_their_gradients(folder: Path, tmp_path: Path) -> None:
    """A data-parallel run of torch: each rank has its own packed experts and the same factors."""
    script = Path(__file__).parent / "two_ranks.py"
    runs = [
        subprocess.Popen(
            [sys.executable, script, folder, tmp_path, str(rank)], stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    for run in runs:
        errors = run.communicate()[1]
        assert run.returncode == 0, errors
    model = packed(folder)
    randomize(ktk.sft.add_lora(model, rank=2))
    alone = [gradients(model, tokens(seed=rank)) for rank in range(2)]
    for rank in range(2):
        together = torch.load(tmp_path / f"{rank}.pt")
        factors = [name for name in alone[0] if "_lora_" in name]
        assert factors
        for name in factors:
            wanted = (alone[0][name] + alone[1][name]) / 2
            torch.testing.assert_close(together[f"module.{name}"], wanted)


def _trainer(model: Any, folder: Path, steps: int, *callbacks: Any) -> Any:
    pytest.importorskip("accelerate")
    data = [{"input_ids": row, "labels": row} for row in tokens(16)]
    arguments = transformers.TrainingArguments(
        str(folder),
        max_steps=4,
        save_steps=2,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    return transformers.Trainer(
        model, arguments, train_dataset=data, callbacks=[*callbacks, _Stop(steps)]
    )


class _Stop(transformers.TrainerCallback):
    """Ends a training early, as a crash would; its schedule stays that of all steps."""

    def __init__(self, after: int) -> None:
        self.after = after

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= self.after


@pytest.mark.slow
@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "peft"])
def test_a_training_goes_on_from_a_checkpoint(folder: Path, tmp_path: Path, wrapped: bool) -> None:
    """Experts in codes are not saved; all that is trained is, and comes back to the bit."""
    config = ktk.transformers.KtkConfig("AMXINT8")
    callbacks = [ktk.sft.SaveAdapters()] if wrapped else []

    def made() -> Any:
        torch.manual_seed(0)
        try:
            model = packed(folder, quantization_config=config)
        except ktk.BackendError as error:
            pytest.skip(str(error))
        for one in model.parameters():
            one.requires_grad_(False)
        if wrapped:
            peft = pytest.importorskip("peft")
            model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
        ktk.sft.add_lora(model, rank=2)
        return model

    straight = made()
    _trainer(straight, tmp_path / "straight", 4, *callbacks).train()
    _trainer(made(), tmp_path / "broken", 2, *callbacks).train()
    saved = tmp_path / "broken" / "checkpoint-2"
    assert sum(one.stat().st_size for one in saved.rglob("*.safetensors")) < 400_000
    other = made()
    again = _trainer(other, tmp_path / "broken", 4, *callbacks)
    again.train(resume_from_checkpoint=True)
    wanted = {n: one for n, one in straight.named_parameters() if one.requires_grad}
    assert any("_lora_" in name for name in wanted)
    for name, one in other.named_parameters():
        if name in wanted:
            assert torch.equal(one, wanted[name]), name


@pytest.mark.slow
def test_the_example_learns(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    script = ROOT / "examples" / "finetune.py"
    run = subprocess.run(
        [sys.executable, script, "--steps", "8", "--length", "16", "--output", tmp_path],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    found = re.search(r"loss: ([\d.]+) at first, ([\d.]+) at last", run.stdout)
    assert found
    assert float(found[2]) < float(found[1])
    assert (tmp_path / "experts" / "adapter_model.safetensors").exists()


@pytest.fixture(autouse=True)
def same_draws() -> None:
    torch.manual_seed(0)
