"""Dense layers of models, packed: within their bounds, in graphs, saved or refused, and freed."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf_model
import numpy as np
import pytest
import quantized
import schemes
import tiny
import torch
from safetensors.torch import load_file
from tiny import FAMILIES, Family, Reference

import ktk
import ktk.transformers
from ktk.hosts.linear import OpLinear
from ktk.testing import bounds, elements, formats, reference
from ktk.transformers import blocks
from ktk.transformers.dense import KtkEmbedding, KtkLinear, packed_linears
from ktk.transformers.packed import packed_modules

F32 = elements.ELEMENTS["f32"]


def tied(name: str) -> Family:
    family = FAMILIES[name]
    return Family(family.made_by, {**family.extra, "tie_word_embeddings": True})


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference.of(FAMILIES["qwen3-moe"].save(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def saved_tied(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference.of(tied("qwen3-moe").save(tmp_path_factory.mktemp("tied")))


def dense(model: Any, backend: str = "BF16") -> Any:
    return ktk.transformers.pack(model, linears=backend, head=backend)


@contextmanager
def recorded(model: Any) -> Iterator[list[tuple[Any, torch.Tensor, torch.Tensor]]]:
    """Keep what packed dense layers are called with, and what they return."""
    calls: list[tuple[Any, torch.Tensor, torch.Tensor]] = []

    def after(module: Any, args: Any, out: torch.Tensor) -> None:
        calls.append((module, args[0].flatten(0, -2).clone(), out.flatten(0, -2).clone()))

    hooks = [
        one.register_forward_hook(after) for one in model.modules() if isinstance(one, KtkLinear)
    ]
    yield calls
    for hook in hooks:
        hook.remove()


def check_linears(model: Any, ids: torch.Tensor) -> None:
    """Each packed layer is within its derived bound of float64 with the weight that is stored."""
    with recorded(model) as calls:
        tiny.logits(model, ids)
    assert {call[0].layer.name for call in calls} == set(packed_linears(model))
    for module, x, out in calls:
        linear = module.layer.linear
        [variant] = [one for one in linear.backend.variants if one.name == linear.variant]
        exact, weight = x.double().numpy(), linear.unpack().astype(np.float64)
        fmt = linear.formats[0]
        depth = formats.fill_bytes(fmt, 1) if formats.is_known(fmt) else variant.k_step
        act = variant.act_of(fmt, variant.n_step, depth)
        stored = reference.encode(reference.Uncertain(exact, np.zeros_like(exact)), act)
        bias = None if module.bias is None else module.bias.detach().double().numpy()
        y = reference.matmul(stored, weight, bias)
        y = y.widened(F32.rounding(y.size, up_to=True))
        bounds.check(out.double().numpy(), y.value, y.error, module.layer.name)


@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v4", "gpt-oss", "qwen3-next"])
def test_bf16_is_as_near_to_float32_as_transformers_is(name: str, tmp_path: Path) -> None:
    found = Reference.of(tied(name).save(tmp_path))
    model = dense(tiny.load(found.folder))
    stock = found.eager - found.logits
    error = found.error(model)
    assert error.norm() <= stock.norm()
    first, second = found.logits.topk(2).values.unbind(-1)
    sure = first - second > 2 * stock.abs().amax()
    assert sure.any()
    chosen = (found.logits + error).argmax(-1)
    assert torch.equal(chosen[sure], found.logits.argmax(-1)[sure])


@pytest.mark.parametrize("backend", ["BF16", "AMXINT8"])
@pytest.mark.parametrize("name", ["gpt-oss", "qwen3-moe"])
def test_each_layer_is_within_its_bound(name: str, backend: str, tmp_path: Path) -> None:
    folder = FAMILIES[name].save(tmp_path)
    exact = tiny.float32(folder)
    model = ktk.transformers.load(folder, linears=backend, head=backend, dtype=torch.float32)
    check_linears(model, tiny.tokens())
    for layer, one in packed_linears(model).items():
        weight = exact.get_submodule(layer).weight.double()
        stored = torch.from_numpy(one.linear.unpack()).double()
        largest = weight.abs().amax(1, keepdim=True)
        # int8 with a scale for each row: half a step, and four roundings of f32 on the way.
        allowed = largest / 254 + 4 * 2**-24 * largest if backend == "AMXINT8" else 0 * largest
        assert ((stored - weight).abs() <= allowed).all()


def test_what_is_packed_and_what_is_not(saved: Reference) -> None:
    model = dense(tiny.load(saved.folder), "AMXINT8")
    layers = [f"model.layers.{n}.self_attn.{p}_proj" for n in range(2) for p in "qkvo"]
    assert set(packed_linears(model)) == {*layers, "lm_head"}
    left = {name for name, one in model.named_parameters() if one.ndim > 1}
    assert left == {
        "model.embed_tokens.weight",
        *(f"model.layers.{n}.mlp.gate.weight" for n in "01"),
    }
    assert {one.linear.backend.name for one in packed_linears(model).values()} == {"AMXINT8"}
    # And by default nothing.
    assert not packed_linears(ktk.transformers.load(saved.folder))


def test_routers_and_narrow_layers_stay(tmp_path: Path) -> None:
    model = dense(tiny.load(FAMILIES["qwen3-next"].save(tmp_path)))
    stay = {name for name, one in model.named_modules() if type(one) is torch.nn.Linear}
    kinds = {name.rpartition(".")[2] for name in stay}
    assert kinds == {"shared_expert_gate", "in_proj_ba"}
    names = {name.split(".", 3)[-1] for name in packed_linears(model)}
    assert {f"mlp.shared_expert.{p}_proj" for p in ("gate", "up", "down")} <= names


def test_the_head_has_an_option_of_its_own(saved: Reference) -> None:
    model = ktk.transformers.load(saved.folder, linears="AMXINT8", head="BF16")
    found = {name: one.linear.backend.name for name, one in packed_linears(model).items()}
    assert found.pop("lm_head") == "BF16"
    assert set(found.values()) == {"AMXINT8"}
    alone = ktk.transformers.load(saved.folder, head="AMXINT8")
    assert set(packed_linears(alone)) == {"lm_head"}


def test_loading_and_packing_make_the_same_bits(saved: Reference) -> None:
    config = ktk.transformers.KtkConfig("AMXINT8", linears="AMXINT8", head="BF16")
    loaded = tiny.load(saved.folder, quantization_config=config)
    model = ktk.transformers.pack(
        tiny.load(saved.folder), "AMXINT8", linears="AMXINT8", head="BF16"
    )
    assert torch.equal(tiny.logits(loaded, saved.ids), tiny.logits(model, saved.ids))


@pytest.mark.parametrize("backend", ["BF16", "AMXINT8"])
def test_a_tied_embedding_is_rows_of_the_head(saved_tied: Reference, backend: str) -> None:
    stock = tiny.load(saved_tied.folder)
    model = dense(tiny.load(saved_tied.folder), backend)
    embedding = model.get_input_embeddings()
    assert isinstance(embedding, KtkEmbedding)
    assert embedding.layer is model.lm_head.layer
    assert not any(len(one) == tiny.VOCABULARY for one in model.parameters())
    ids = tiny.tokens()
    rows = embedding(ids)
    assert rows.dtype == torch.bfloat16
    if backend == "BF16":
        assert torch.equal(rows, stock.get_input_embeddings()(ids))
    else:
        weight = torch.from_numpy(model.lm_head.layer.linear.unpack())
        assert torch.equal(rows, weight[ids].bfloat16())
    assert model.float().get_input_embeddings()(ids).dtype == torch.float32


def test_tensors_are_freed_one_after_the_other(saved_tied: Reference, monkeypatch: Any) -> None:
    model = tiny.load(saved_tied.folder)
    alive = [
        weakref.ref(one)
        for name, one in model.named_parameters()
        if "proj" in name or "emb" in name
    ]
    most = 0
    real = OpLinear.__init__

    def init(self: Any, *args: Any) -> None:
        nonlocal most
        real(self, *args)
        most = max(most, len(packed_linears(model)) + sum(ref() is not None for ref in alive))

    monkeypatch.setattr(OpLinear, "__init__", init)
    before = len(alive) - sum(".experts." in name for name, _ in model.named_parameters())
    dense(model)
    gc.collect()
    assert most <= before  # at no time two of a layer, but of the one that is being packed
    assert not any(ref() is not None for ref in alive)


def test_a_graph_of_the_whole_model(saved_tied: Reference) -> None:
    model = dense(tiny.load(saved_tied.folder))
    wanted = tiny.logits(model, saved_tied.ids)
    torch._dynamo.reset()
    compiled = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(saved_tied.ids).logits.double(), wanted)


@pytest.mark.parametrize("name", ["linear", "rows"])
def test_torch_finds_nothing_wrong_with_the_operators(saved_tied: Reference, name: str) -> None:
    model = dense(tiny.load(saved_tied.folder))
    layer = model.lm_head.layer
    arguments: tuple[Any, ...] = (torch.randn(3, 2, tiny.H), layer.number, tiny.VOCABULARY)
    if name == "rows":
        arguments = (tiny.tokens(), layer.number, tiny.H, torch.bfloat16)
    torch.library.opcheck(
        getattr(torch.ops.ktk, name).default,
        arguments,
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_what_surrounds_dense_layers_may_change_its_dtype(
    saved_tied: Reference, dtype: torch.dtype
) -> None:
    model = dense(tiny.load(saved_tied.folder)).to(dtype)
    assert model.lm_head.weight.dtype == dtype
    assert saved_tied.error(model).norm() <= (saved_tied.eager - saved_tied.logits).norm()


def test_copies_share_what_is_packed(saved: Reference) -> None:
    model = dense(tiny.load(saved.folder))
    other = copy.deepcopy(model)
    assert other.lm_head.layer is model.lm_head.layer
    assert torch.equal(tiny.logits(other, saved.ids), tiny.logits(model, saved.ids))
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(model.lm_head)


@pytest.mark.parametrize("which", ["saved", "saved_tied"])
def test_bf16_is_saved_as_it_was(which: str, request: Any, tmp_path: Path) -> None:
    found = request.getfixturevalue(which)
    dense(tiny.load(found.folder)).save_pretrained(tmp_path)
    stock, again = tiny.load(found.folder).state_dict(), tiny.load(tmp_path).state_dict()
    assert list(again) == list(stock)
    assert all(torch.equal(again[name], one) for name, one in stock.items())


def test_codes_are_not_saved_as_something_else(saved: Reference, tmp_path: Path) -> None:
    model = ktk.transformers.load(saved.folder, linears="AMXINT8")
    with pytest.raises(ValueError, match=r"self_attn.q_proj is packed for AMXINT8.*without loss"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*"))


def test_whoever_wants_the_weight_is_told(saved: Reference) -> None:
    model = dense(tiny.load(saved.folder))
    weight = model.lm_head.weight
    assert (weight.shape, weight.dtype, weight.device.type) == ((320, 128), torch.bfloat16, "cpu")
    for use in (lambda: weight + 1, lambda: weight[0], lambda: weight.normal_()):
        with pytest.raises(RuntimeError, match=r"lm_head.weight is packed by ktk.*options linears"):
            use()


def test_a_gradient_through_a_dense_layer_is_refused(saved: Reference) -> None:
    model = ktk.transformers.pack(tiny.load(saved.folder), linears="BF16")
    x = torch.randn(2, tiny.H, requires_grad=True)
    with pytest.raises(RuntimeError, match="dense layer that ktk has packed"):
        model.model.layers[0].self_attn.q_proj(x).sum().backward()


def test_adapters_add_to_packed_layers(saved: Reference) -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(dense(tiny.load(saved.folder)), lora)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, one in model.named_parameters():
            if "lora_" in name:
                one.normal_(std=0.1)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    x = torch.randn(3, tiny.H, dtype=torch.bfloat16)
    with torch.no_grad():
        delta = layer.lora_B["default"](layer.lora_A["default"](x.float()))
        wanted = layer.base_layer(x) + delta * layer.scaling["default"]
        assert torch.equal(layer(x), wanted.bfloat16())
    with pytest.raises(RuntimeError, match="is packed by ktk"):
        model.merge_and_unload()


def test_unusual_names_and_models(saved: Reference) -> None:
    with pytest.raises(TypeError, match="linears must be the name of a backend"):
        ktk.transformers.KtkConfig(linears=8)  # type: ignore[arg-type]
    with pytest.raises(ktk.BackendError, match="NONE"):
        ktk.transformers.load(saved.folder, linears="NONE")
    model = ktk.transformers.pack(tiny.load(saved.folder))
    assert ktk.transformers.pack(model, linears="BF16") is model  # experts are packed already
    assert packed_modules(model)
    assert packed_linears(model)


@pytest.fixture(params=["QWEN3", "TIED", "GPT_OSS"])  # which has biases
def gguf_file(request: Any, tmp_path: Path) -> tuple[Path, Any]:
    """Write a GGUF file; return it, and the model in float32 that its blocks mean."""
    return gguf_model.write(tmp_path, getattr(gguf_model, request.param))


def test_matrices_of_a_gguf_file_stay_in_their_blocks(gguf_file: tuple[Path, Any]) -> None:
    path, exact = gguf_file
    model = ktk.transformers.load(path, dtype=torch.float32)
    linears = packed_linears(model)
    assert len(linears) == 9
    assert {one.linear.backend.name for one in linears.values()} == {"LLAMAFILE"}
    for name, one in linears.items():
        assert torch.equal(torch.from_numpy(one.linear.unpack()), exact.get_submodule(name).weight)
        assert 34 / 32 <= one.linear.nbytes / one.linear.unpack().size < 1.1  # Q8_0
    wide = {name for name, one in model.named_parameters() if one.ndim > 1}
    assert {name.split(".", 3)[-1] for name in wide} <= {
        *("mlp.gate.weight", "mlp.router.weight"),
        *("mlp.experts.gate_up_proj_bias", "mlp.experts.down_proj_bias"),
    }
    ids = tiny.tokens()
    embedding = model.get_input_embeddings()
    assert torch.equal(embedding(ids), exact.get_input_embeddings()(ids))
    assert (embedding.layer is model.lm_head.layer) == exact.config.tie_word_embeddings
    check_linears(model, ids)


def test_a_gguf_file_may_be_requantised_if_that_is_asked_for(gguf_file: tuple[Path, Any]) -> None:
    path, exact = gguf_file
    model = ktk.transformers.load(path, linears="AMXINT8", head="BF16")
    found = {name: one.linear.backend.name for name, one in packed_linears(model).items()}
    assert found.pop("lm_head") == "BF16"
    assert set(found.values()) == {"AMXINT8"}
    wanted = exact.lm_head.weight.bfloat16().float()
    assert torch.equal(torch.from_numpy(model.lm_head.layer.linear.unpack()), wanted)


def test_rows_that_transformers_rearranges_are_rearranged_as_blocks() -> None:
    from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor

    processor = LlamaTensorProcessor({"num_attention_heads": 4, "num_key_value_heads": 2})
    values = np.random.default_rng(0).normal(size=(32, 64)).astype(np.float32)
    for name in ("blk.0.attn_q.weight", "blk.0.attn_k.weight", "blk.0.attn_v.weight"):
        order = blocks._order(processor, name, values.shape, {})
        wanted = processor.process(values, name).weights
        assert (order is None) == ("attn_v" in name)
        assert np.array_equal(values if order is None else values[order], wanted)


@pytest.mark.parametrize(
    "change", [lambda w: w + 1, lambda w: w.T, lambda w: w[:, ::-1], lambda w: np.sort(w, 0)[::2]]
)
def test_matrices_of_which_values_change_are_decoded(change: Any) -> None:
    class Processor:
        def process(self, weights: Any, name: str, **rest: Any) -> Any:
            return SimpleNamespace(name=name, weights=change(weights))

    with pytest.raises(blocks._OtherValuesError):
        blocks._order(Processor(), "blk.0.attn_q.weight", (8, 8), {})


def test_bytes_that_a_token_reads(saved_tied: Reference) -> None:
    stock = tiny.load(saved_tied.folder)
    found = ktk.transformers.bytes_per_token(stock)
    h, inter, rows = tiny.H, tiny.INTER, tiny.VOCABULARY
    attention = 2 * (h * 128 + 2 * h * 64 + 128 * h)
    assert found["experts"] == 2 * 2 * tiny.TOP_K * 3 * h * inter
    assert found["linears"] == 2 * attention
    assert found["head"] == 2 * rows * h
    norms_and_routers = sum(
        one.nbytes for name, one in stock.named_parameters() if "norm" in name or ".gate." in name
    )
    assert found["other"] == norms_and_routers + 2 * h
    packed = ktk.transformers.bytes_per_token(dense(stock, "AMXINT8"))
    assert packed["experts"] >= found["experts"]  # BF16, padded
    for part in ("linears", "head"):  # a byte for each weight, and 4 for each row
        assert found[part] / 2 < packed[part] < found[part] * 0.6
    assert packed["other"] < found["other"]


# How attention is stored, beside experts stored so, and who computes it.
CODES = {
    **dict.fromkeys(("fp8 by blocks", "fp8 by rows"), "FP8"),
    **dict.fromkeys(("int4", "gptq, symmetric"), "RAWINT4"),
    "mxfp4": "MXFP4",
    "int8 by rows": "AMXINT8",
    "gptq": "AMXINT4",
    "awq": "AMXINT4",
}


def in_codes(folder: Path, name: str) -> tuple[Path, Any]:
    """Write a model with attention and routers in codes, too; return the folder and the model."""
    most = 15 if name == "awq" else 16
    awq = schemes.U4_ZERO, schemes.awq, schemes.AWQ_CONFIG
    fmt, make, quantization = awq if name == "awq" else schemes.SCHEMES[name]
    _, exact = quantized.rewritten(folder, fmt, make, quantization, most=most)
    tensors = load_file(folder / "model.safetensors")
    rng = np.random.default_rng(1)
    for tensor in [one for one in tensors if one.endswith(("_proj.weight", "mlp.gate.weight"))]:
        if ".experts." in tensor:
            continue
        source = formats.make_source(fmt, tensors.pop(tensor).float().numpy(), rng)
        source = quantized.in_four_bits(source, most)
        stem = tensor.removesuffix(".weight")
        tensors |= {stem + suffix: one for suffix, one in make(source).items()}
        exact.get_parameter(tensor).data = torch.from_numpy(source.values).float()
    quantized.rewrite(folder, tensors, quantization)
    return folder, exact


@pytest.mark.parametrize("name", CODES)
def test_codes_of_a_checkpoint_are_computed_as_they_are_stored(name: str, tmp_path: Path) -> None:
    folder, exact = in_codes(tmp_path, name)
    model = ktk.transformers.load(folder, dtype=torch.float32)
    layers = packed_linears(model)
    assert {one.linear.backend.name for one in layers.values()} == {CODES[name]}
    assert len(layers) == 8
    for layer, one in layers.items():
        weight = exact.get_submodule(layer).weight
        # f32 multiplies a code, and maybe its zero point, with the scale.
        allowed = 2**-20 * weight.abs().amax(1, keepdim=True)
        assert ((torch.from_numpy(one.linear.unpack()) - weight).abs() <= allowed).all()
    for number in range(2):  # routers are floats, whatever they were
        gate = f"model.layers.{number}.mlp.gate.weight"
        torch.testing.assert_close(
            model.get_parameter(gate), exact.get_parameter(gate), rtol=2**-20, atol=2**-24
        )
    check_linears(model, tiny.tokens())


def test_codes_become_others_if_that_is_asked_for(tmp_path: Path) -> None:
    folder, _ = in_codes(tmp_path, "fp8 by blocks")
    model = ktk.transformers.load(folder, linears="AMXINT8")
    assert {one.linear.backend.name for one in packed_linears(model).values()} == {"AMXINT8"}
