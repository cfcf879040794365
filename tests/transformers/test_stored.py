"""Experts in codes are computed in codes, as files have them, and by nobody but ktk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf_model
import pytest
import quantized
import tiny
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny import FAMILIES, Reference
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.quantizers.base import HfQuantizer

import ktk
import ktk.transformers
from ktk.checkpoint.open import open_checkpoint
from ktk.conversion import convert
from ktk.testing.reference import Expert, expert
from ktk.transformers.dense import packed_linears
from ktk.transformers.norms import speed_up_norms
from ktk.transformers.packed import Packed, packed_modules
from tests.unit.test_transformers_oracle import one_row

Writer = Callable[[Path], tuple[Path, Any]]


def scheme(name: str) -> Writer:
    return lambda folder: quantized.qwen3(folder, name)


def converted(to: str, family: str) -> Writer:
    return lambda folder: quantized.converted(folder, to, family)


# What is written, who computes it, and whether activations become 8 bits.
STORED: dict[str, tuple[Writer, str, bool]] = {
    "fp8 by blocks": (scheme("fp8 by blocks"), "FP8", False),
    "fp8 by blocks, attention too": (quantized.fp8_everywhere, "FP8", False),
    "fp8 by rows": (scheme("fp8 by rows"), "FP8", False),
    "mxfp4 of gpt-oss": (quantized.gpt_oss, "MXFP4", False),
    "mxfp4": (scheme("mxfp4"), "MXFP4", False),
    "int4 of Kimi-K2": (quantized.kimi_k2, "RAWINT4", True),
    "int4 by rows": (scheme("int4 by rows"), "RAWINT4", True),
    "int8 by rows": (scheme("int8 by rows"), "AMXINT8", True),
    "gptq": (scheme("gptq"), "AMXINT4", True),
    "gptq, symmetric": (scheme("gptq, symmetric"), "RAWINT4", True),
    "awq": (quantized.awq, "AMXINT4", True),
    "int4 by ktk": (converted("int4", "qwen3-moe"), "RAWINT4", True),
    "fp8 by ktk": (converted("fp8", "deepseek-v3"), "FP8", False),
    "nvfp4 by ktk": (converted("nvfp4", "mixtral"), "MXFP4", False),
    "mxfp4 by ktk": (converted("mxfp4", "deepseek-v3"), "MXFP4", False),
    "gguf": (gguf_model.write, "LLAMAFILE", True),
    "gguf of gpt-oss": (gguf_model.write_gpt_oss, "LLAMAFILE", True),
    "gguf, tied": (gguf_model.write_tied, "LLAMAFILE", True),
    "gguf in files of ten tensors": (gguf_model.write_split, "LLAMAFILE", True),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STORED)
def test_codes_are_computed_as_they_are_stored(name: str, tmp_path: Path) -> None:
    write, backend, eight_bits = STORED[name]
    path, exact = write(tmp_path)
    found = Reference.of(path, exact)
    model = ktk.transformers.load(path)
    packed = packed_modules(model)
    assert [one.moe.backend.name for one in packed.values()] == [backend] * len(found.calls.inputs)
    # Of activations in 8 bits each layer's error is bounded; bf16 is not what to compare with.
    check_layers(path, found, list(packed.values()))
    if not eight_bits:
        stock = found.eager - found.logits
        assert found.error(model).norm() <= stock.norm()
    check_rest(ktk.transformers.load(path, dtype=torch.float32), exact)


def check_layers(path: Path, found: Reference, packed: list[Packed]) -> None:
    """Each layer is within its derived bound of what the stored numbers mean, in float64."""
    with open_checkpoint(path) as checkpoint:
        for index, one in enumerate(packed):
            layer = checkpoint.layer(checkpoint.layers()[index])
            [act] = [v.act for v in one.moe.backend.variants if v.name == one.moe.variant]
            weights = {}
            x, ids, scales = (part[:6] for part in found.calls.inputs[index])
            x = x.bfloat16()
            got = one(x.float(), ids, scales).double().numpy()
            bound, wanted = 0.0 * got, 0.0 * got
            for token in range(len(x)):
                for e, scale in zip(ids[token].tolist(), scales[token].tolist(), strict=True):
                    if e >= one.moe.config.num_experts:  # a zero expert
                        passed = scale * x[token].double().numpy()
                        bound[token] += 2**-22 * abs(passed)
                        wanted[token] += passed
                        continue
                    if e not in weights:
                        parts = layer.values(e).arrays()
                        exact = {k: v.double().numpy() for k, v in parts.items()}
                        stored = one.moe.unpack_expert(e)
                        weights[e] = exact, dict(zip(("gate", "up", "down"), stored, strict=True))
                    row = x[token].double().numpy()
                    bound[token] += abs(scale) * one_row(row, *weights[e], one.moe.config, act)
                    values = Expert.of(weights[e][0])
                    wanted[token] += scale * expert(row, values, one.moe.config)
            assert (abs(got - wanted) <= bound * (1 + 1e-5) + 1e-6 * abs(wanted) + 1e-12).all()


def check_rest(model: Any, exact: Any) -> None:
    """A model in float32 is transformers' own, with the layers that were just checked."""
    ids = tiny.tokens(seed=1)

    def instead(layer: Any) -> Any:
        return lambda module, args, out: layer(*args)

    for name, layer in packed_modules(model).items():
        exact.get_submodule(name).register_forward_hook(instead(layer))
    if packed_linears(model):
        speed_up_norms(exact)  # which test_decoding checks
    for name in packed_linears(model):  # which test_linears checks
        exact.get_submodule(name).register_forward_hook(instead(model.get_submodule(name)))
    wanted, got = tiny.logits(exact, ids), tiny.logits(model, ids)
    for tensor, one in model.named_parameters():
        assert torch.equal(one, exact.get_parameter(tensor)), tensor
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("where", ["beside", "inside", "named"])
def test_folders_that_were_converted(where: str, tmp_path: Path) -> None:
    source = FAMILIES["qwen3-moe"].save(tmp_path / "model")
    output = {"beside": tmp_path, "inside": source, "named": tmp_path / "far" / "away"}[where]
    output.mkdir(parents=True, exist_ok=True)
    packed = output / "packed"
    convert(source, packed, backend="AMXINT4")
    if where == "named":
        with pytest.raises(ktk.CheckpointError, match=r"model that they were made of .*experts="):
            ktk.transformers.load(packed)
        model = ktk.transformers.load(source, experts=packed)
    else:
        model = ktk.transformers.load(packed)
    assert {one.moe.backend.name for one in packed_modules(model).values()} == {"AMXINT4"}
    ids = tiny.tokens()
    quantized = ktk.transformers.load(source, backend="AMXINT4")
    assert torch.equal(tiny.logits(model, ids), tiny.logits(quantized, ids))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["AMXINT4", "LLAMAFILE"])
def test_folders_that_were_converted_from_a_gguf_file(backend: str, tmp_path: Path) -> None:
    source, _ = gguf_model.write(tmp_path, gguf_model.QWEN3)
    packed = tmp_path / "far" / "packed"
    packed.parent.mkdir()
    convert(source, packed, backend=backend)
    model = ktk.transformers.load(source, experts=packed)
    assert {one.moe.backend.name for one in packed_modules(model).values()} == {backend}
    ids = tiny.tokens()
    direct = ktk.transformers.load(source, backend=backend)
    assert torch.equal(tiny.logits(model, ids), tiny.logits(direct, ids))


def _rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    [path] = folder.glob("*.safetensors")
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


def _lacks(folder: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if ".layers.1.self_attn." in name]:
            del tensors[name]

    _rewrite(folder, change)


def _is_another(folder: Path) -> None:
    _rewrite(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(8)}))


def _has_more_layers(folder: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(folder)
    config.num_hidden_layers += 1
    config.save_pretrained(folder)


def _is_cut(folder: Path) -> None:
    [path] = folder.glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-4])


def _generates_from_nothing(folder: Path) -> None:
    (folder / "generation_config.json").write_text("null")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_lacks, r"lacks model.layers.1.self_attn.* and \d+ more tensors, which config.json wants"),
        (_has_more_layers, r"lacks model.layers.\d.* more tensors, which config.json wants"),
        (_is_another, r"model.norm.weight has shape \[8\], and config.json wants \[\d+\]"),
        (_is_cut, r"model.safetensors is damaged or truncated"),
        (_generates_from_nothing, r"generation_config.json cannot be read: it is None"),
    ],
)
def test_files_that_are_not_the_models_are_refused(
    damage: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    path = FAMILIES["qwen3-moe"].save(tmp_path)
    damage(path)
    with pytest.raises(ktk.CheckpointError, match=message):
        ktk.transformers.load(path)


@pytest.mark.parametrize("write", [quantized.kimi_k2, quantized.gpt_oss, quantized.fp8_everywhere])
def test_classes_load_as_auto_classes_do(write: Writer, tmp_path: Path) -> None:
    path, exact = write(tmp_path)
    model = type(exact).from_pretrained(path, experts_implementation="ktk")
    ids = tiny.tokens()
    assert torch.equal(tiny.logits(model, ids), tiny.logits(ktk.transformers.load(path), ids))


def test_codes_that_ktk_does_not_compute_are_nobody_elses(tmp_path: Path) -> None:
    path, _ = quantized.kimi_k2(tmp_path)
    config = transformers.AutoConfig.from_pretrained(path)
    config.hidden_act = "mish"
    with pytest.raises(ktk.CheckpointError, match="stored in codes, and ktk does not compute all"):
        tiny.load(path, config=config, experts_implementation="ktk")


def test_a_quantizer_that_somebody_asks_for_sees_to_the_rest(tmp_path: Path) -> None:
    path = FAMILIES["qwen3-moe"].save(tmp_path)
    asked = transformers.QuantoConfig
    seen = []

    class Counting(HfQuantizer):
        def _process_model_before_weight_loading(self, model: Any, **rest: Any) -> None:
            seen.append([name for name, _ in model.named_parameters() if "experts" in name])

        def is_serializable(self) -> bool:
            return True

        is_trainable = True

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(AUTO_QUANTIZER_MAPPING, "quanto", Counting)
        model = tiny.load(
            path, experts_implementation="ktk", quantization_config=asked(weights="int8")
        )
    assert seen == [[]]
    assert isinstance(model.hf_quantizer, Counting)
    assert len(packed_modules(model)) == 2


def test_a_backend_is_taken_by_name(tmp_path: Path) -> None:
    folder = FAMILIES["qwen3-moe"].save(tmp_path)
    config = ktk.transformers.KtkConfig("AMXINT8")
    model = tiny.load(folder, experts_implementation="ktk", quantization_config=config)
    assert {one.moe.backend.name for one in packed_modules(model).values()} == {"AMXINT8"}
    alone = tiny.load(folder, quantization_config=config)
    assert alone.config._experts_implementation == "ktk"
    assert torch.equal(tiny.logits(alone, tiny.tokens()), tiny.logits(model, tiny.tokens()))


def test_codes_are_not_saved_as_something_else(tmp_path: Path) -> None:
    folder = FAMILIES["qwen3-moe"].save(tmp_path / "model")
    model = ktk.transformers.load(folder, backend="AMXINT8")
    with pytest.raises(ValueError, match=r"packed for AMXINT8.*ktk convert SOURCE OUTPUT"):
        model.save_pretrained(tmp_path / "saved")
    assert not list((tmp_path / "saved").glob("*"))


def test_a_file_that_lacks_a_tensor_is_not_filled_with_random_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ktk.transformers import gguf as reading

    path, _ = gguf_model.write_gpt_oss(tmp_path)
    monkeypatch.setattr(reading, "_UNMAPPED", ())
    with pytest.raises(ktk.CheckpointError, match=r"lacks model\.layers\.0\.self_attn\.sinks"):
        ktk.transformers.load(path)


def test_the_tokenizer_of_a_file(tmp_path: Path) -> None:
    path, _ = gguf_model.write(tmp_path)
    tokenizer = ktk.transformers.load_tokenizer(path)
    assert tokenizer.decode(tokenizer("tea at nine").input_ids) == "tea at nine"
    model = ktk.transformers.load(path)
    ids = tokenizer("tea", return_tensors="pt").input_ids
    assert model.generate(ids, max_new_tokens=3, do_sample=False).shape[1] > ids.shape[1]


def test_no_tensor_of_an_expert_is_decoded_by_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import modeling_gguf_pytorch_utils as stock

    path, _ = gguf_model.write(tmp_path)
    asked = []
    real = stock.TensorProcessor.process

    def process(self: Any, weights: Any, name: str, **rest: Any) -> Any:
        asked.append(name)
        return real(self, weights, name, **rest)

    monkeypatch.setattr(stock.TensorProcessor, "process", process)
    monkeypatch.setattr(stock.Qwen2MoeTensorProcessor, "process", process)
    ktk.transformers.load(path)
    assert any("attn_q" in name for name in asked)
    assert not any("_exps" in name for name in asked)


def test_files_converted_for_another_function_are_refused(tmp_path: Path) -> None:
    source, packed = FAMILIES["qwen3-moe"].save(tmp_path / "source"), tmp_path / "packed"
    convert(source, packed, backend="AMXINT8", activation="relu")
    with pytest.raises(ktk.CheckpointError, match="--activation relu, and the model computes silu"):
        ktk.transformers.load(source, experts=packed)
    convert(source, tmp_path / "same", backend="AMXINT8", activation="silu")
    assert packed_modules(ktk.transformers.load(source, experts=tmp_path / "same"))
