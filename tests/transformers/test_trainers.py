"""Programs that train models with packed experts: ranks, `Trainer`, and the example."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import training
import transformers
from tiny import logits, tokens
from training import RATE, STEPS, gradients, packed, packed_by, randomize, seed_of

import ktk
import ktk.sft
import ktk.transformers

folder, same_draws = training.folder, training.same_draws
ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_two_ranks_average_their_gradients(how: str, folder: Path, tmp_path: Path) -> None:
    """Data-parallel runs of torch: each rank packs experts, and has all factors or half.

    What they save after two steps is whole, and comes back to either.
    """
    script = Path(__file__).parent / "two_ranks.py"
    runs = [
        subprocess.Popen(
            [sys.executable, script, folder, tmp_path, str(rank), how],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for run in runs:
        errors = run.communicate()[1]
        assert run.returncode == 0, errors
    model = packed(folder)
    randomize(ktk.sft.add_lora(model, rank=2))
    factors = {n: one for n, one in model.named_parameters() if "_lora_" in n}
    assert factors
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for step in range(STEPS):
        alone = [gradients(model, tokens(seed=seed_of(step, rank))) for rank in range(2)]
        for name, one in factors.items():
            wanted = (alone[0][name] + alone[1][name]) / 2
            for rank in range(2):
                torch.testing.assert_close(found[rank][step][name], wanted)
            # The same step as there, to the bit: what is near would be rounded to another bf16.
            one.data.add_(found[0][step][name], alpha=-RATE)
    trained = [torch.load(tmp_path / f"trained-{rank}.pt") for rank in range(2)]
    folders = [tmp_path / f"checkpoint-{STEPS}" / "experts"]
    folders += [tmp_path / layout for layout in ("peft", "peft-fused") if how == "fsdp"]
    for saved in folders:
        other = packed(folder)
        ktk.sft.load_adapter(other, saved)
        named = dict(other.named_parameters())
        for name, one in factors.items():
            assert all(torch.equal(one, each[name]) for each in trained), name
            if saved.name != "peft-fused":  # of twice the rank
                assert torch.equal(named[name], one), name
        assert torch.equal(logits(other, tokens()), logits(model, tokens()))
    if how == "fsdp":
        ktk.sft.merge(model)
        for rank in range(2):
            assert torch.equal(torch.load(tmp_path / f"merged-{rank}.pt"), logits(model, tokens()))


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
    callbacks = [ktk.sft.SaveAdapters()] if wrapped else []

    def made() -> Any:
        torch.manual_seed(0)
        model = packed_by("AMXINT8", folder)
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
