"""Adapters of experts are written, read and merged, as PEFT and kt-kernel have them."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import training
from tiny import FAMILIES, float32, load, logits, tokens
from training import ROUNDED, forward_error, gradients, off_by, off_by_token, packed, randomize

import ktk
import ktk.sft
import ktk.transformers
from ktk.transformers.packed import packed_modules

folder, model, same_draws = training.folder, training.model, training.same_draws


@pytest.mark.parametrize("layout", ["peft", "peft-fused", "kt", "parameters"])
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


def test_adapters_come_from_peft(folder: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    ids = tokens()
    tensors = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=[], target_parameters=tensors)
    trained = peft.get_peft_model(float32(folder), config)
    randomize([one for name, one in trained.named_parameters() if "lora_" in name])
    trained.save_pretrained(tmp_path)
    model = packed(folder)
    assert off_by_token(logits(model, ids), logits(trained, ids)) > 4 * forward_error(model)
    ktk.sft.load_adapter(model, tmp_path)
    assert off_by_token(logits(model, ids), logits(trained, ids)) < forward_error(model)


def test_peft_trains_attention_beside_adapters_of_experts(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(packed(folder), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    of_attention, _ = model.get_nb_trainable_parameters()
    factors = ktk.sft.add_lora(model, rank=2)
    model.print_trainable_parameters()
    all_of_them = of_attention + sum(one.numel() for one in factors)
    assert f"trainable params: {all_of_them:,} " in capsys.readouterr().out
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


def test_a_compiled_model_has_the_names_of_its_original(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = packed(folder)
    randomize(ktk.sft.add_lora(model, rank=2))
    ktk.sft.save_adapter(model, tmp_path / "plain")
    wanted = logits(model, tokens())
    compiled: Any = torch.compile(model)
    ktk.sft.save_adapter(compiled, tmp_path / "compiled")
    model.model.layers[1] = torch.compile(model.model.layers[1])
    ktk.sft.save_adapter(model, tmp_path / "in-part")
    plain, *others = (
        load_file(tmp_path / name / "adapter_model.safetensors")
        for name in ("plain", "compiled", "in-part")
    )
    for other in others:
        assert other.keys() == plain.keys()
        assert all(torch.equal(other[name], plain[name]) for name in plain)
    again = packed(folder)
    compiled = torch.compile(again)
    ktk.sft.load_adapter(compiled, tmp_path / "compiled")
    assert torch.equal(logits(again, tokens()), wanted)


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


def test_merging_leaves_copies_of_a_model_as_they_are(folder: Path) -> None:
    reference, ids = packed(folder), tokens()
    wanted = logits(reference, ids)
    model = copy.deepcopy(reference)
    randomize(ktk.sft.add_lora(model, rank=4, alpha=8))
    adapted = logits(model, ids)
    ktk.sft.merge(model)
    assert 0 < off_by(logits(model, ids), adapted) < ROUNDED
    assert torch.equal(logits(reference, ids), wanted)


@pytest.mark.parametrize("at", [3, 11])
def test_an_interrupted_merge_is_finished_by_another(
    folder: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Adapters are added once, whether within the first module or the second it stops."""
    model, whole = packed(folder), packed(folder)
    for one in (model, whole):
        torch.manual_seed(0)
        randomize(ktk.sft.add_lora(one, rank=4, alpha=8))
    adapted = logits(model, tokens())
    calls = iter(range(at))
    load_expert = ktk.MoE.load_expert

    def interrupted(*arguments: Any, **weights: Any) -> Any:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return load_expert(*arguments, **weights)

    with monkeypatch.context() as patched:
        patched.setattr(ktk.MoE, "load_expert", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ktk.sft.merge(model)
    assert off_by(logits(model, tokens()), adapted) < ROUNDED
    finished, wanted = (logits(ktk.sft.merge(one), tokens()) for one in (model, whole))
    assert torch.equal(finished, wanted)


def test_factors_that_are_not_finite_are_not_merged(model: Any) -> None:
    factors = ktk.sft.add_lora(model, rank=2)
    factors[-1].data[3, 0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"down_lora_b of .*layers\.1.*experts .* not finite"):
        ktk.sft.merge(model)
    factors[-1].data[3, 0, 0] = 0.0
    ktk.sft.merge(model)


@pytest.mark.parametrize(
    ("dtype", "fits", "beyond"),
    [(torch.float16, 6e4, 7e4), (torch.bfloat16, 3e38, 3.4e38), (torch.float32, 3e38, 1e39)],
)
def test_sums_that_a_type_cannot_hold_are_not_merged(
    folder: Path, tmp_path: Path, dtype: torch.dtype, fits: float, beyond: float
) -> None:
    """The last of all sums is wrong, and no module is changed."""
    float32(folder).to(dtype).save_pretrained(tmp_path)
    model = training.packed_by("BF16" if dtype == torch.bfloat16 else "LLAMAFILE", tmp_path)
    *_, a, b = ktk.sft.add_lora(model, rank=2, alpha=2, targets=["down"])
    before = list(packed_modules(model).values())
    assert {one.dtype for one in before} == {dtype}
    a.data[-1, 0, -1], b.data[-1, -1, 0] = 1e19, beyond / 1e19
    sentence = (
        rf"layers\.1\..*: down of expert 7 and its factors have a sum that {dtype} cannot hold"
    )
    with pytest.raises(ValueError, match=sentence):
        ktk.sft.merge(model)
    assert list(packed_modules(model).values()) == before
    b.data[-1, -1, 0] = fits / 1e19
    ktk.sft.merge(model)
    down = packed_modules(model)[before[-1].name].moe.unpack_expert(7)[2]
    unit = torch.finfo(dtype).eps
    assert down is not None
    assert down[-1, -1] == pytest.approx(fits, rel=unit, abs=1)


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        safetensors.SafetensorError("I/O error: No space left on device (os error 28)"),
    ],
)
def test_adapters_are_written_whole_or_not_at_all(
    error: Exception, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = packed(folder)
    randomize(ktk.sft.add_lora(model, rank=2))
    ktk.sft.save_adapter(model, tmp_path)
    wanted = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(state: Any, path: Path, **_: Any) -> None:
        Path(path).write_bytes(b"half of it")
        raise error

    randomize(list(model.parameters()))
    with monkeypatch.context() as patched:
        patched.setattr(safetensors.torch, "save_file", full)
        with pytest.raises(OSError, match="No space left") as raised:
            ktk.sft.save_adapter(model, tmp_path)
    assert str(tmp_path / "adapter_model.safetensors") in str(raised.value)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == wanted


def test_names_are_those_of_a_model_that_ranks_share(folder: Path, tmp_path: Path) -> None:
    """DistributedDataParallel has the model in an attribute `module`."""
    from safetensors.torch import load_file

    model = packed(folder)
    randomize(ktk.sft.add_lora(model, rank=2))
    wrapped = torch.nn.Module()
    wrapped.module = model
    ktk.sft.save_adapter(model, tmp_path / "plain")
    ktk.sft.save_adapter(wrapped, tmp_path / "wrapped")
    plain, other = (
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("plain", "wrapped")
    )
    assert other.keys() == plain.keys()


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
