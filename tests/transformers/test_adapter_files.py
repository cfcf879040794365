"""Files of adapters: of every family, with PEFT's options, and damaged."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_families
import torch
import training
from safetensors.torch import load_file, save_file
from tiny import EXPERTS, FAMILIES, INTER, Family, H, float32, logits, tokens
from training import forward_error, off_by_token, packed, randomize

import ktk.sft
import ktk.transformers
from ktk.sft.folders import AdapterError
from ktk.transformers import modules
from ktk.transformers.adapter import lora_of, put_lora
from ktk.transformers.packed import packed_modules

folder, model, same_draws = training.folder, training.model, training.same_draws

LAYOUTS = ("peft", "peft-fused", "kt", "parameters")
TENSORS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
PREFIX = "base_model.model.model.layers"


def add(model: Any, **options: Any) -> Any:
    gated = all(one.layout.gated for one in packed_modules(model).values())
    targets = ("gate", "up", "down") if gated else ("up", "down")
    randomize(ktk.sft.add_lora(model, targets=targets, **options))
    return model


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("targets", [None, ("up",), ("down",)], ids=["all", "up", "down"])
def test_every_family_reads_what_it_wrote(
    name: str, targets: tuple[str, ...] | None, tmp_path: Path
) -> None:
    """Zeros that stand in a layout change no sum."""
    folder = FAMILIES[name].save(tmp_path / "model")
    model = packed(folder)
    if targets is None:
        add(model, rank=4, alpha=8)
    else:
        randomize(ktk.sft.add_lora(model, rank=4, alpha=8, targets=targets))
    wanted = logits(model, tokens())
    for layout in LAYOUTS:
        ktk.sft.save_adapter(model, tmp_path / layout, layout)
        other = packed(folder)
        ktk.sft.load_adapter(other, tmp_path / layout)
        assert torch.equal(logits(other, tokens()), wanted)


@pytest.mark.parametrize("name", FAMILIES)
def test_stock_models_have_the_outputs_that_peft_gives_them(name: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    folder = FAMILIES[name].save(tmp_path / "model")
    model = add(packed(folder), rank=4, alpha=8)
    ktk.sft.save_adapter(model, tmp_path / "adapter", "peft-fused")
    stock = peft.PeftModel.from_pretrained(float32(folder), str(tmp_path / "adapter"))
    mine, theirs = logits(model, tokens()), logits(stock, tokens())
    assert off_by_token(mine, theirs) < forward_error(model)
    assert off_by_token(logits(packed(folder), tokens()), theirs) > 4 * forward_error(model)


@pytest.mark.parametrize(
    "options",
    [
        {"use_rslora": True},
        {"target_parameters": TENSORS[::-1]},
        {"alpha_pattern": {"mlp.experts.down_proj": 32}},
        {"alpha_pattern": {r"layers\.1\.mlp\.experts\.gate_up_proj": 12}},
        {"rank_pattern": {"mlp.experts.down_proj": 2}},
        {"rank_pattern": {"gate_up_proj": 8}, "alpha_pattern": {"gate_up_proj": 20}},
        {"alpha_pattern": {r"layers\.0\.mlp\.experts\.down_proj": 12}},
        {"rank_pattern": {rf"layers\.0\.{name}": 8 for name in TENSORS}},
    ],
    ids=str,
)
def test_options_of_peft_that_change_numbers_count(
    options: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    given: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": []}
    config = peft.LoraConfig(**given | {"target_parameters": TENSORS} | options)
    trained = peft.get_peft_model(float32(folder), config)
    randomize([one for name, one in trained.named_parameters() if "lora_" in name])
    trained.save_pretrained(tmp_path)
    model = packed(folder)
    ktk.sft.load_adapter(model, tmp_path)
    wanted = logits(trained, tokens())
    assert off_by_token(logits(model, tokens()), wanted) < forward_error(model)
    # What was read is written as it is computed, whichever way: files say one rank and one alpha.
    for layout in LAYOUTS:
        ktk.sft.save_adapter(model, tmp_path / layout, layout)
        other = packed(folder)
        ktk.sft.load_adapter(other, tmp_path / layout)
        assert off_by_token(logits(other, tokens()), wanted) < forward_error(model)
    stock = peft.PeftModel.from_pretrained(float32(folder), str(tmp_path / "peft-fused"))
    torch.testing.assert_close(logits(stock, tokens()), wanted, rtol=1e-4, atol=1e-4)


def test_names_of_older_mixtrals_are_read(tmp_path: Path) -> None:
    folder = FAMILIES["mixtral"].save(tmp_path / "model")
    model = add(packed(folder), rank=4)
    ktk.sft.save_adapter(model, tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    state = load_file(file)
    for new, old in (
        (".mlp.experts.", ".block_sparse_moe.experts."),
        (".gate_proj.", ".w1."),
        (".up_proj.", ".w3."),
        (".down_proj.", ".w2."),
    ):
        state = {name.replace(new, old): one for name, one in state.items()}
    save_file(state, file)
    other = packed(folder)
    ktk.sft.load_adapter(other, tmp_path)
    assert torch.equal(logits(other, tokens()), logits(model, tokens()))


def changed(key: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    def do(folder: Path) -> None:
        file = folder / "adapter_model.safetensors"
        state = load_file(file)
        state[key] = change(state[key])
        save_file(state, file)

    return do


def moved(old: str, new: str | None) -> Callable[[Path], None]:
    def do(folder: Path) -> None:
        file = folder / "adapter_model.safetensors"
        state = load_file(file)
        one = state.pop(old)
        save_file(state | ({} if new is None else {new: one}), file)

    return do


def configured(**options: Any) -> Callable[[Path], None]:
    def do(folder: Path) -> None:
        path = folder / "adapter_config.json"
        config = json.loads(path.read_text()) | options
        path.write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))

    return do


def cut(name: str) -> Callable[[Path], None]:
    def do(folder: Path) -> None:
        (folder / name).write_bytes((folder / name).read_bytes()[:-20])

    return do


def written(text: str) -> Callable[[Path], None]:
    def do(folder: Path) -> None:
        (folder / "adapter_config.json").write_text(text)

    return do


LAST = f"{PREFIX}.1.mlp.experts.7"
A, B = f"{LAST}.up_proj.lora_A.weight", f"{LAST}.up_proj.lora_B.weight"
DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "no alpha": (
        written("{}"),
        r"adapter_config\.json: lora_alpha must be a number, got None",
    ),
    "null alpha": (configured(lora_alpha=None), "lora_alpha must be a number, got None"),
    "alpha of words": (
        configured(alpha_pattern={"up_proj": "x"}),
        "alpha_pattern 'up_proj' must be a number, got 'x'",
    ),
    "no finite alpha": (
        configured(lora_alpha=float("nan")),
        "lora_alpha must be a finite number of float32, got nan",
    ),
    "alpha beyond float32": (
        configured(lora_alpha=1e39),
        r"adapter_config\.json: lora_alpha must be a finite number of float32, got 1e\+39",
    ),
    "alpha beyond floats": (
        configured(lora_alpha=10**400),
        "lora_alpha must be a finite number of float32, got 1000",
    ),
    "alpha of one beyond float32": (
        configured(alpha_pattern={"up_proj": -1e39}),
        r"alpha_pattern 'up_proj' must be a finite number of float32, got -1e\+39",
    ),
    "alphas in a list": (
        configured(alpha_pattern=[1]),
        r"alpha_pattern must be an object, got \[1\]",
    ),
    "broken pattern": (
        configured(alpha_pattern={"(": 1}),
        r"alpha_pattern '\(' is no regular expression",
    ),
    "broken JSON": (cut("adapter_config.json"), r"adapter_config\.json is not JSON"),
    "a list": (
        written("[1]"),
        "is not an object",
    ),
    "truncated": (cut("adapter_model.safetensors"), r"adapter_model\.safetensors cannot be read"),
    "another kind": (configured(peft_type="IA3"), "peft_type is 'IA3', and ktk computes LORA"),
    "biases": (configured(bias="all"), "bias is 'all'"),
    "DoRA": (configured(use_dora=True), "use_dora is set, which ktk does not compute"),
    "KaSA": (configured(kasa_config={"beta": 1}), "kasa_config is set"),
    "PiSSA": (
        configured(init_lora_weights="pissa_niter_4"),
        "init_lora_weights is 'pissa_niter_4', .* path_initial_model_for_weight_conversion",
    ),
    "bias of B": (configured(lora_bias=True), "lora_bias is set"),
    "one dimension": (
        changed(A, lambda one: one[0].clone()),
        rf"{A.removeprefix('base_model.model.')} has shape \[128\], and this model's experts want",
    ),
    "another rank": (
        changed(A, lambda one: one[:3].clone()),
        rf"up_proj.lora_B.weight has shape \[{INTER}, 4\], and this model's experts want"
        rf" \[{INTER}, 3\]",
    ),
    "another model": (
        changed(A, lambda one: one[:, :64].clone()),
        rf"has shape \[4, 64\], and this model's experts want \[any, {H}\]",
    ),
    "no rank": (changed(A, lambda one: one[:0].clone()), r"want \[64, 0\]"),
    "numbers": (changed(A, lambda one: one.int()), "is of torch.int32, not of floats"),
    "one is missing": (moved(B, None), "up_proj.lora_B.weight is missing"),
    "an expert too many": (
        moved(A, A.replace(".7.", f".{EXPERTS}.")),
        "lora_A.weight is missing",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_an_adapter_that_cannot_be_read_leaves_the_model_alone(
    name: str, folder: Path, tmp_path: Path
) -> None:
    ktk.sft.save_adapter(add(packed(folder), rank=4), tmp_path)
    model = add(packed(folder), rank=2)
    before = logits(model, tokens())
    damage, sentence = DAMAGE[name]
    damage(tmp_path)
    with pytest.raises(AdapterError, match=sentence) as caught:
        ktk.sft.load_adapter(model, tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert torch.equal(logits(model, tokens()), before)


@pytest.mark.parametrize("other", [f"{PREFIX}.1.mlp.experts.8", f"{PREFIX}.2.mlp.experts.0"])
def test_factors_that_no_expert_wants_are_named(other: str, folder: Path, tmp_path: Path) -> None:
    model = add(packed(folder), rank=4)
    ktk.sft.save_adapter(model, tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    state = load_file(file)
    for side in "AB":
        key = f"{LAST}.up_proj.lora_{side}.weight"
        state[key.replace(LAST, other)] = state[key].clone()
    save_file(state, file)
    with pytest.raises(AdapterError, match="which no experts of this model take"):
        ktk.sft.load_adapter(model, tmp_path)


def test_ranks_scales_and_dtypes_of_experts_may_differ(folder: Path, tmp_path: Path) -> None:
    """As patterns of PEFT have it where experts are modules; float64 becomes float32."""
    model = add(packed(folder), rank=4, alpha=8)
    ktk.sft.save_adapter(model, tmp_path)
    changed(A, lambda one: one[:2].double().contiguous())(tmp_path)
    changed(B, lambda one: one[:, :2].contiguous())(tmp_path)
    configured(alpha_pattern={r"experts\.[67]\.up_proj": 6})(tmp_path)
    other = packed(folder)
    ktk.sft.load_adapter(other, tmp_path)
    given, found = (lora_of(one.model.layers[1].mlp.experts) for one in (model, other))
    assert given is not None
    assert found is not None
    for (name, wanted), (_, got) in zip(given.factors(), found.factors(), strict=True):
        one = wanted.detach().clone()
        if name == "up_a":
            one[7, 2:] = 0
        if name == "up_b":
            one[7, :, 2:] = 0
            one[7] *= (6 / 2) / (8 / 4)
            one[6] *= (6 / 4) / (8 / 4)
        assert torch.equal(got, one)


def test_a_rank_of_nothing_is_refused(folder: Path, tmp_path: Path) -> None:
    model = add(packed(folder), rank=4)
    ktk.sft.save_adapter(model, tmp_path)
    changed(A, lambda one: one[:0].clone())(tmp_path)
    changed(B, lambda one: one[:, :0].contiguous())(tmp_path)
    with pytest.raises(AdapterError, match=r"experts\.7\.up_proj have a rank of 0"):
        ktk.sft.load_adapter(model, tmp_path)


def test_one_folder_has_one_adapter(folder: Path, tmp_path: Path) -> None:
    model = add(packed(folder), rank=4)
    for layout in ("peft", "kt"):
        ktk.sft.save_adapter(model, tmp_path, layout)
    with pytest.raises(AdapterError, match=r"has factors of .* by two kinds of names: remove one"):
        ktk.sft.load_adapter(model, tmp_path)


def test_parameters_keep_the_rank_and_scale_of_each_module(folder: Path, tmp_path: Path) -> None:
    """A training goes on with them: what is filled up would be other parameters."""
    model = packed(folder)
    for layer, rank, scale, dtype in (
        (model.model.layers[0], 4, 1 / 3, torch.bfloat16),
        (model.model.layers[1], 2, 0.0, torch.float32),
    ):
        shapes = {"up_a": (EXPERTS, rank, H), "up_b": (EXPERTS, INTER, rank)}
        factors: dict[str, Any] = {n: torch.randn(s).to(dtype) for n, s in shapes.items()}
        put_lora(layer.mlp.experts, ktk.Lora(**factors, scale=scale))
    ktk.sft.save_adapter(model, tmp_path, "parameters")
    other = packed(folder)
    ktk.sft.load_adapter(other, tmp_path)
    for mine, again in zip(model.model.layers, other.model.layers, strict=True):
        wanted, found = lora_of(mine.mlp.experts), lora_of(again.mlp.experts)
        assert wanted is not None
        assert found is not None
        assert found.scale == wanted.scale
        for (name, one), (same, value) in zip(wanted.factors(), found.factors(), strict=True):
            assert name == same
            assert value.dtype == one.dtype
            assert torch.equal(value, one)
    file = tmp_path / "expert_parameters.safetensors"
    state = load_file(file)
    [scale_of_last] = [name for name in state if name.endswith("1.mlp.experts.lora_scale")]
    for broken, sentence in (
        ({scale_of_last: torch.tensor(float("inf"))}, r"lora_scale must be a finite .*, got inf"),
        (
            {scale_of_last: torch.tensor(1e39, dtype=torch.float64)},
            r"parameters\.safetensors: .*lora_scale must be a finite number of float32, got 1e\+39",
        ),
        ({scale_of_last: torch.ones(2)}, r"lora_scale has shape \[2\]"),
        ({}, "lora_scale is missing"),
    ):
        rest = {name: one for name, one in state.items() if name != scale_of_last}
        save_file(rest | broken, file)
        with pytest.raises(AdapterError, match=sentence):
            ktk.sft.load_adapter(other, tmp_path)


def test_two_modules_of_one_layer_keep_their_own(tmp_path: Path) -> None:
    """DiffusionGemma's encoder and decoder call the same experts, with adapters of their own."""
    made = tiny_families.FAMILIES["diffusion-gemma"].make(H, INTER).bfloat16()
    model = ktk.transformers.pack(made)
    randomize(ktk.sft.add_lora(model, rank=2))
    wanted = {n: one.detach().clone() for n, one in model.named_parameters() if "_lora_" in n}
    for layout in ("peft", "parameters"):
        ktk.sft.save_adapter(model, tmp_path / layout, layout)
        randomize([one for name, one in model.named_parameters() if name in wanted], seed=9)
        ktk.sft.load_adapter(model, tmp_path / layout)
        for name, one in model.named_parameters():
            assert name not in wanted or torch.equal(one, wanted[name]), name
    with pytest.raises(AdapterError, match=r"layer \d has experts in two modules.*\"parameters\""):
        ktk.sft.save_adapter(model, tmp_path / "kt", "kt")
    assert not (tmp_path / "kt").exists()
    # Files of kt-kernel's layout that somebody wrote for one of the two.
    ktk.sft.save_adapter(add(packed(FAMILIES["qwen3-moe"].save(tmp_path / "m"))), tmp_path, "kt")
    sizes = next(iter(packed_modules(model).values())).moe.config
    shapes = {
        "gate_lora_a": (sizes.num_experts, 2, sizes.hidden_size),
        "gate_lora_b": (sizes.num_experts, sizes.intermediate_size, 2),
    }
    state = {f"layers.0.experts.{name}": torch.ones(shape) for name, shape in shapes.items()}
    save_file(state, tmp_path / "fused_expert_lora.safetensors")
    with pytest.raises(AdapterError, match="tells no modules apart"):
        ktk.sft.load_adapter(model, tmp_path)


@pytest.mark.parametrize("layout", ["peft", "kt"])
def test_experts_without_gates_take_no_factors_of_gates(layout: str, tmp_path: Path) -> None:
    model = add(packed(FAMILIES["nemotron-h"].save(tmp_path / "model")), rank=4)
    ktk.sft.save_adapter(model, tmp_path, layout)
    [file] = tmp_path.glob("*.safetensors")
    state = load_file(file)
    gates = {n.replace("up_", "gate_"): one.clone() for n, one in state.items() if "up_" in n}
    save_file(state | gates, file)
    with pytest.raises(AdapterError, match=r"gate_.*, which no experts of this model take"):
        ktk.sft.load_adapter(model, tmp_path)


def test_matrices_of_one_shape_need_names(tmp_path: Path) -> None:
    square = {"layers_block_type": ["full_attention", "moe"], "moe_intermediate_size": H}
    model = add(packed(Family("NemotronHForCausalLM", square).save(tmp_path / "model")), rank=4)
    wanted = logits(model, tokens())
    ktk.sft.save_adapter(model, tmp_path / "peft")
    ktk.sft.load_adapter(model, tmp_path / "peft")
    assert torch.equal(logits(model, tokens()), wanted)
    ktk.sft.save_adapter(model, tmp_path / "fused", "peft-fused")
    with pytest.raises(AdapterError, match='save the adapter with layout="peft"'):
        ktk.sft.load_adapter(model, tmp_path / "fused")


def test_saving_a_model_says_where_its_adapter_goes(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modules, "_said", set())
    model = packed(folder)
    with caplog.at_level(logging.WARNING, "ktk.transformers"):
        model.save_pretrained(tmp_path)
        assert not caplog.records
        add(model, rank=4)
        for _ in range(2):
            model.save_pretrained(tmp_path)
    [said] = [one.message for one in caplog.records if one.name == "ktk.transformers"]
    assert "from_pretrained leaves out" in said
    assert "ktk.sft.save_adapter(model, folder)" in said
    assert "ktk.sft.merge(model)" in said
