"""Dense layers of models: which are packed, by what, and how exactly."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from dense_layers import check_linears, dense, tied
from tiny import FAMILIES, Reference

import ktk
import ktk.transformers
from ktk.hosts.linear import OpLinear
from ktk.transformers.dense import KtkEmbedding, packed_linears
from ktk.transformers.packed import packed_modules


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


def test_unusual_names_and_models(saved: Reference) -> None:
    with pytest.raises(TypeError, match="linears must be the name of a backend"):
        ktk.transformers.KtkConfig(linears=8)  # type: ignore[arg-type]
    with pytest.raises(ktk.BackendError, match="NONE"):
        ktk.transformers.load(saved.folder, linears="NONE")
    model = ktk.transformers.pack(tiny.load(saved.folder))
    assert ktk.transformers.pack(model, linears="BF16") is model  # experts are packed already
    assert packed_modules(model)
    assert packed_linears(model)


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


def test_a_tied_head_is_asked_to_be_tied_again(saved_tied: Reference) -> None:
    """As scripts for training do, that resize embeddings to what they are."""
    model = dense(tiny.load(saved_tied.folder), "BF16")
    ids = tiny.tokens()
    before = tiny.logits(model, ids)
    model.tie_weights()
    model.resize_token_embeddings(model.get_input_embeddings().num_embeddings)
    assert torch.equal(tiny.logits(model, ids), before)


@pytest.mark.parametrize("options", [{"linears": "BF16"}, {"head": "BF16"}, {}], ids=str)
def test_pickle_is_told_what_cannot_be(saved: Reference, options: dict[str, str]) -> None:
    model = ktk.transformers.load(saved.folder, **options)
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(model)
    other = copy.deepcopy(model)
    assert [type(one) for one in other.modules()] == [type(one) for one in model.modules()]
    assert torch.equal(tiny.logits(other, tiny.tokens()), tiny.logits(model, tiny.tokens()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_has_the_dtype_of_products(saved: Reference, dtype: torch.dtype) -> None:
    model = ktk.transformers.load(saved.folder, linears="BF16", head="BF16")
    with torch.autocast("cpu", dtype=dtype), torch.no_grad():
        assert model(tiny.tokens()).logits.dtype == dtype
