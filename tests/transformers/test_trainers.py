"""Programs that train models with packed experts: ranks, `Trainer`, and the example."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import published
import pytest
import torch
import training
import transformers
from safetensors.torch import load_file
from tiny import logits, tokens
from training import RATE, STEPS, gradients, packed, packed_by, randomize, seed_of

import ktk
import ktk.sft
import ktk.transformers
from ktk.conversion import convert
from ktk.hub import cache_folder
from ktk.transformers.adapter import lora_of, put_lora
from tests.unit.test_model_command import store

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


def _trainer(
    model: Any, folder: Path, steps: int, *callbacks: Any, rate: float = 1e-2, **options: Any
) -> Any:
    pytest.importorskip("accelerate")
    data = [{"input_ids": row, "labels": row} for row in tokens(16)]
    arguments = transformers.TrainingArguments(
        str(folder),
        max_steps=4,
        save_steps=2,
        per_device_train_batch_size=4,
        learning_rate=rate,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        logging_steps=1,
        **options,
    )
    return transformers.Trainer(
        model,
        arguments,
        train_dataset=data,
        eval_dataset=data,
        callbacks=[*callbacks, _Stop(steps)],
    )


class _Stop(transformers.TrainerCallback):
    """Ends a training early, as a crash would; its schedule stays that of all steps."""

    def __init__(self, after: int) -> None:
        self.after = after

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= self.after


def _wrapped(folder: Path, rank: int = 2) -> Any:
    """Return a model with adapters of PEFT and of experts in codes, the same ones each time."""
    torch.manual_seed(0)
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    model = peft.get_peft_model(packed_by("AMXINT8", folder), config)
    ktk.sft.add_lora(model, rank=rank)
    return model


def _trained(model: Any) -> dict[str, Any]:
    return {n: one.detach().clone() for n, one in model.named_parameters() if one.requires_grad}


@pytest.mark.slow
def test_the_best_checkpoint_is_read_with_its_experts(folder: Path, tmp_path: Path) -> None:
    model = _wrapped(folder)
    # The loss falls from checkpoint to checkpoint, and the best is to be another than the last.
    trainer = _trainer(
        model,
        tmp_path,
        4,
        ktk.sft.SaveAdapters(),
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        greater_is_better=True,
        eval_strategy="steps",
        eval_steps=2,
    )
    trainer.train()
    assert Path(trainer.state.best_model_checkpoint).name == "checkpoint-2"
    best = _wrapped(folder)
    best.load_adapter(str(tmp_path / "checkpoint-2"), "default")
    ktk.sft.load_adapter(best, tmp_path / "checkpoint-2" / "experts")
    wanted, got = dict(best.named_parameters()), _trained(model)
    assert sum("_lora_" in name for name in got) == 2 * 6
    for name, one in got.items():
        assert torch.equal(one, wanted[name]), name


@pytest.mark.slow
def test_a_training_goes_on_from_another_folder(folder: Path, tmp_path: Path) -> None:
    straight = _wrapped(folder)
    _trainer(straight, tmp_path / "straight", 4, ktk.sft.SaveAdapters()).train()
    _trainer(_wrapped(folder), tmp_path / "broken", 2, ktk.sft.SaveAdapters()).train()
    saved = tmp_path / "broken" / "checkpoint-2"
    other = _wrapped(folder)
    # Without a checkpoint, and with one of another training that has the same name.
    _trainer(_wrapped(folder), tmp_path / "used", 2, ktk.sft.SaveAdapters(), rate=0.1).train()
    for place in ("new", "used"):
        trainer = _trainer(other, tmp_path / place, 4, ktk.sft.SaveAdapters())
        with pytest.raises(ValueError, match=f"another checkpoint than .*{place}.*resume_from"):
            trainer.train(resume_from_checkpoint=str(saved))
    callback = ktk.sft.SaveAdapters(resume_from=saved)
    _trainer(other, tmp_path / "new", 4, callback).train(resume_from_checkpoint=str(saved))
    for name, one in _trained(straight).items():
        assert torch.equal(dict(other.named_parameters())[name], one), name


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
        if wrapped:  # as of an adapter of PEFT's that was read: ranks and scales are each module's
            last = [one for one in model.modules() if lora_of(one) is not None][-1]
            given = lora_of(last)
            assert given is not None
            factors: dict[str, Any] = {
                n: one.detach()[:, :1] if n.endswith("a") else one.detach()[:, :, :1]
                for n, one in given.factors()
            }
            put_lora(last, ktk.Lora(**factors, scale=1 / 3))
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
def test_a_training_does_not_go_on_with_what_its_optimizer_does_not_know(
    folder: Path, tmp_path: Path
) -> None:
    _trainer(_wrapped(folder), tmp_path, 2, ktk.sft.SaveAdapters()).train()
    again = _trainer(_wrapped(folder, rank=3), tmp_path, 4, ktk.sft.SaveAdapters())
    # Not the optimizer's file, which would be the first to disagree.
    for name in ("optimizer.pt", "scheduler.pt"):
        (tmp_path / "checkpoint-2" / name).unlink()
    with pytest.raises(ValueError, match=r"experts has another .*gate_lora_a than the training"):
        again.train(resume_from_checkpoint=True)


def test_trials_of_a_search_have_folders_of_their_own(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    model = packed(folder)
    ktk.sft.add_lora(model, rank=2)
    for trial, seconds in (("run-0", 10), ("run-2", 5), ("run-1", 20)):
        checkpoint = tmp_path / trial / "checkpoint-2"
        checkpoint.mkdir(parents=True)
        os.utime(checkpoint, (seconds, seconds))
    state = transformers.TrainerState(
        global_step=2, is_hyper_param_search=True, is_world_process_zero=True
    )
    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    ktk.sft.SaveAdapters().on_save(arguments, state, None, model=model)
    [saved] = tmp_path.glob("**/experts")
    assert saved.parent.parent.name == "run-1"


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


def finetune(path: Path | str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the example in this process."""
    data = folder / "my.txt"
    data.write_text("The capital of France is Paris.\nThat of Italy is Rome.\n")
    output = folder / "trained"
    given = [f"--model={path}", f"--data={data}", "--steps=2", "--length=8", f"--output={output}"]
    monkeypatch.setattr(sys, "argv", ["finetune.py", *given])
    runpy.run_path(str(ROOT / "examples" / "finetune.py"), run_name="__main__")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("deepseek-v3", None),
        ("deepseek-v4", None),
        ("FP8 by blocks", None),
        ("GGUF", None),
        ("GGUF", "AMXINT8"),
        ("Kimi-K2 in int4", None),
        ("nemotron-h", None),
    ],
)
def test_the_example_takes_models_as_they_are_stored(
    name: str,
    backend: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Also what `ktk convert` made of them, for a backend; attention is trained wherever it is."""
    pytest.importorskip("accelerate")
    pytest.importorskip("peft")
    path, _ = published.write(name, tmp_path / "model")
    if backend is not None:
        source, path = path, path.parent / "packed"
        convert(source, path, backend=backend)
    finetune(path, tmp_path, monkeypatch)
    said = capsys.readouterr().out
    assert f"experts are computed by {backend or published.MODELS[name][1]}\n" in said
    experts = load_file(tmp_path / "trained" / "experts" / "adapter_model.safetensors")
    assert any(one.any() for name, one in experts.items() if "lora_B" in name)
    attention = tmp_path / "trained" / "attention" / "adapter_model.safetensors"
    assert attention.exists() == (name != "nemotron-h")
    if attention.exists():
        assert all("attn" in name for name in load_file(attention))


@pytest.mark.slow
def test_the_example_takes_a_name_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a model in the cache, one of GGUF's, which transformers would not find by that."""
    pytest.importorskip("accelerate")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    path, _ = published.write("GGUF", tmp_path / "model")
    store(cache_folder(), "acme/tiny-GGUF", path.parent)
    finetune("acme/tiny-GGUF", tmp_path, monkeypatch)
    assert "experts are computed by LLAMAFILE\n" in capsys.readouterr().out


def test_the_example_leaves_half_a_download_to_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which goes on with it by the name; the folder in the cache has no weights yet."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    path, _ = published.write("deepseek-v3", tmp_path / "model")
    for weights in path.glob("*.safetensors"):
        weights.unlink()
    store(cache_folder(), "acme/half", path)
    asked = []

    def load_tokenizer(name: str | Path) -> None:
        asked.append(str(name))
        raise SystemExit

    monkeypatch.setattr(ktk.transformers, "load_tokenizer", load_tokenizer)
    with pytest.raises(SystemExit):
        finetune("acme/half", tmp_path, monkeypatch)
    assert asked == ["acme/half"]
