"""ktk's hooks around SGLang's own methods on a CPU: what they load, compute, and need."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import sglang_checkpoints as checkpoints
import sglang_engine
import sglang_gpu as gpu
import sglang_stage
import torch
from sglang_checkpoints import SHAPES, E, H
from sglang_engine import FP8, Engine, of_quantization

import ktk
from ktk.hosts.choice import Mode
from ktk.sglang import choice, engine, experts, linears
from ktk.testing import bounds, reference
from ktk.testing.formats import as_float64
from ktk.testing.subject import Subject

SHARDS = {"gate": "w1", "up": "w3", "down": "w2"}
#: method of SGLang's -> its quant_config, and the kind of checkpoint
METHODS: dict[str, tuple[str, Any, str]] = {
    "floats": ("unquant.UnquantizedFusedMoEMethod", None, "bf16"),
    "blocks": ("fp8.Fp8MoEMethod", FP8, "fp8 by blocks"),
    "rows": ("fp8.Fp8MoEMethod", {**FP8, "weight_block_size": None}, "fp8 by rows"),
    "tensors": ("fp8.Fp8MoEMethod", {**FP8, "weight_block_size": None}, "fp8 by tensors"),
    "mxfp8": ("fp8.Fp8MoEMethod", {**FP8, "use_mxfp8": True}, "mxfp8"),
    "int8": ("w8a8_int8.W8A8Int8MoEMethod", {}, "int8"),
}


def method_of(loaded: Engine, name: str) -> Any:
    where, config, _ = METHODS[name]
    module, _, cls = where.partition(".")
    kind = getattr({"unquant": loaded.unquant, "fp8": loaded.fp8}.get(module, loaded.int8), cls)
    return kind() if config is None else kind(of_quantization(**config))


def load(layer: Any, kind: str, only: int = E, version: int = 1, parts: int = 3 * E) -> None:
    """Give a layer its checkpoint as a model of SGLang does, in an order of its own."""
    params = dict(layer.named_parameters())
    tensors_of = checkpoints.KINDS[kind][1]
    assert tensors_of is not None
    order = np.random.default_rng(0).permutation(3 * only)
    for number, part in ((int(n) // 3, list(SHAPES)[int(n) % 3]) for n in order[:parts]):
        source = checkpoints.sources(kind, version)[number][part]
        for suffix, tensor in tensors_of(source).items():
            stem = "w2" if part == "down" else "w13"
            name = f"{stem}_{suffix[1:]}"
            params[name].weight_loader(
                params[name], tensor, f"experts.{name}", shard_id=SHARDS[part], expert_id=number
            )


def expected(layer: Any, kind: str, inputs: Any) -> reference.Uncertain:
    moe = layer.ktk_layer.moe
    [variant] = [one for one in moe.backend.variants if one.name == moe.variant]
    subject = Subject(moe.backend, variant)
    gate, up, down = (subject.act_of(one) for one in (moe.format, moe.up_format, moe.down_format))
    values: list[dict[str, Any]] = [
        {part: parts[part].values for part in SHAPES} for parts in checkpoints.sources(kind, 1)
    ]
    found = [reference.Expert(**one) for one in values]
    hidden, ids, weights = inputs
    return reference.bounded_layer(
        as_float64(hidden),
        ids.numpy().astype(np.int64),
        as_float64(weights),
        found,
        moe.config,
        (gate, up, down),
        [width for shard in moe._core.slices for width in shard],
        out="bf16",
    )


@pytest.mark.parametrize("name", METHODS)
def test_layers_of_experts_are_packed_and_computed(name: str, made: Engine) -> None:
    kind, method = METHODS[name][2], method_of(made, name)
    layer = sglang_engine.experts(made, method, checkpoints.config())
    assert not [param for param in layer.parameters() if param.numel()], "raw experts"
    load(layer, kind)
    method.process_weights_after_loading(layer)
    method.process_weights_after_loading(layer)  # as after an update that brought nothing
    moe = layer.ktk_layer.moe
    for number, parts in enumerate(checkpoints.sources(kind, 1)):
        for part, got in zip(SHAPES, moe.unpack_expert(number), strict=True):
            error = bounds.gamma(2) * np.abs(parts[part].values)
            bounds.check(got, parts[part].values, error, f"{part} of expert {number}")
    for tokens in (1, 9):
        inputs = checkpoints.inputs(tokens)
        inputs[1][0, 0] = -1
        hidden, ids, weights = inputs
        got = method.apply(layer, gpu.Dispatch(hidden, gpu.TopK(weights, ids))).hidden_states
        want = expected(layer, kind, inputs)
        bounds.check(as_float64(got), want.value, want.error, f"{tokens} tokens")
        assert torch.equal(got, moe(hidden, ids, weights))


@pytest.mark.parametrize("name", METHODS)
def test_weights_that_come_again_count_in_the_next_call(name: str, made: Engine) -> None:
    kind, (hidden, ids, weights) = METHODS[name][2], checkpoints.inputs(9)
    layers = []
    for _ in range(2):
        method = method_of(made, name)
        layers.append((method, sglang_engine.experts(made, method, checkpoints.config())))

    def call(method: Any, layer: Any) -> torch.Tensor:
        given = gpu.Dispatch(hidden, gpu.TopK(weights, ids))
        result: torch.Tensor = method.apply(layer, given).hidden_states
        return result

    for version, (method, layer) in enumerate(layers, 1):
        load(layer, kind, version=version)
        method.process_weights_after_loading(layer)
    (_, second), (method, layer) = layers[1], layers[0]
    before, wanted = call(method, layer), call(*layers[1])
    assert not torch.equal(before, wanted)
    load(layer, kind, version=2)  # as update_weights_from_tensor, which says nothing afterwards
    assert torch.equal(call(method, layer), wanted)
    load(layer, kind, version=1, parts=E)
    for act in (call, lambda method, layer: method.process_weights_after_loading(layer)):
        with pytest.raises(ktk.CheckpointError, match=r"mlp\.experts: expert \d is not whole"):
            act(method, layer)
    load(layer, kind, version=1)  # as update_weights_from_disk after one that failed
    method.process_weights_after_loading(layer)
    assert torch.equal(call(method, layer), before)
    assert torch.equal(call(method, second), wanted)


def test_ranks_have_their_rows_and_columns(made: Engine) -> None:
    inputs = checkpoints.inputs(7)
    hidden, ids, weights = inputs
    parts = []
    for rank in range(2):
        method = method_of(made, "blocks")
        layer = sglang_engine.experts(made, method, checkpoints.config(), ranks=2, moe_tp_rank=rank)
        load(layer, "fp8 by blocks")
        method.process_weights_after_loading(layer)
        assert layer.ktk_layer.moe.config.intermediate_size == checkpoints.INNER // 2
        given = gpu.Dispatch(hidden.float(), gpu.TopK(weights, ids))
        parts.append(method.apply(layer, given).hidden_states.double())
    method = method_of(made, "blocks")
    whole = sglang_engine.experts(made, method, checkpoints.config())
    load(whole, "fp8 by blocks")
    method.process_weights_after_loading(whole)
    want = expected(whole, "fp8 by blocks", inputs)
    bounds.check((parts[0] + parts[1]).numpy(), want.value, want.error, "two ranks")


def test_experts_of_other_ranks_are_not_taken(made: Engine) -> None:
    method = method_of(made, "floats")
    layer = sglang_engine.experts(
        made,
        method,
        checkpoints.config(),
        moe_ep_size=2,
        _expert_storage_rank=1,
        num_local_experts=E // 2,
        _num_local_routed=E // 2,
    )
    load(layer, "bf16")
    method.process_weights_after_loading(layer)
    moe = layer.ktk_layer.moe
    assert moe.config.num_experts == E // 2
    for number in range(E // 2):
        parts = checkpoints.sources("bf16", 1)[E // 2 + number]
        for part, got in zip(SHAPES, moe.unpack_expert(number), strict=True):
            assert np.array_equal(got, parts[part].values)


def test_experts_that_did_not_come_are_named(made: Engine) -> None:
    method = method_of(made, "floats")
    layer = sglang_engine.experts(made, method, checkpoints.config())
    load(layer, "bf16", only=E - 2)
    with pytest.raises(RuntimeError, match=r"mlp\.experts: nothing came of experts 6-7"):
        method.process_weights_after_loading(layer)


@pytest.mark.parametrize(
    "runner",
    [
        {"activation": "gelu"},
        {"is_gated": False},
        {"gemm1_alpha": 1.7, "gemm1_beta": 0.5},
    ],
)
def test_what_ktk_does_not_compute_stays_with_sglang(runner: dict[str, Any], made: Engine) -> None:
    method = method_of(made, "floats")
    options = {"moe_runner_config": sglang_engine.Runner(**runner), "hidden_size": H}
    layer = sglang_engine.experts(made, method, checkpoints.config(), **options)
    assert layer.w2_weight.shape == (E, H, checkpoints.INNER)
    assert "ktk_collector" not in layer.__dict__


def test_routing_weights_may_multiply_the_input(made: Engine) -> None:
    method = method_of(made, "floats")
    runner = sglang_engine.Runner(apply_router_weight_on_input=True)
    layer = sglang_engine.experts(
        made, method, checkpoints.config(), moe_runner_config=runner, hidden_size=H
    )
    load(layer, "bf16")
    method.process_weights_after_loading(layer)
    assert layer.ktk_layer.moe.config.apply_router_weight_on_input


def test_zero_experts_pass_tokens_on(
    made: Engine, patch: pytest.MonkeyPatch, mainline: Path
) -> None:
    """LongCat-Flash's own block, with a router that names them for half of all ids."""
    method = method_of(made, "floats")
    layer = sglang_engine.experts(made, method, checkpoints.config())
    load(layer, "bf16")
    method.process_weights_after_loading(layer)
    moe = layer.ktk_layer.moe
    module = sglang_stage.load(patch, mainline, "sglang.srt.models.longcat_flash")
    hidden, ids, weights = checkpoints.inputs(9)
    ids = torch.where(torch.arange(ids.numel()).reshape(ids.shape) % 2 > 0, ids, ids + E)
    block = SimpleNamespace(
        router=lambda x: x,
        topk=lambda x, logits: (weights.clone(), ids.clone(), logits),
        zero_expert_type="identity",
        num_experts=E,
        experts=lambda x, chosen: method.apply(layer, gpu.Dispatch(x, chosen)).hidden_states,
        routed_scaling_factor=1.0,
    )
    got = module.LongcatFlashMoE.forward(block, hidden)
    with_zero = moe(hidden, torch.where(ids < E, ids, -1), weights)
    factor = torch.where(ids < E, 0, weights).double().sum(-1, keepdim=True)
    added = factor * hidden.double()
    # The products and their sum are rounded to bf16 once each.
    error = 2.0**-8 * (2 * added.abs() + with_zero.double().abs())
    assert ((got.double() - with_zero.double() - added).abs() <= error).all()
    assert (added.abs() > 10 * error).any()


def test_activations_are_those_of_the_runner() -> None:
    silu = experts.activation_of(sglang_engine.Runner(swiglu_limit=7.0))
    assert silu == {"activation": "silu", "activation_limit": 7.0}
    oai = experts.activation_of(sglang_engine.Runner(gemm1_alpha=1.702, gemm1_clamp_limit=7.0))
    assert oai == {
        "activation": "swigluoai",
        "activation_alpha": 1.702,
        "activation_limit": 7.0,
    }


def test_hooks_are_registered_where_sglang_has_no_kernels(
    patch: pytest.MonkeyPatch, mainline: Path
) -> None:
    for variable, amx, wanted in (
        ("", False, True),
        ("", True, False),
        ("1", True, True),
        ("0", False, False),
    ):
        loaded = sglang_engine.engine(patch, mainline)
        import sglang.srt.utils as utils

        patch.setattr(utils, "cpu_has_amx_support", lambda amx=amx: amx)
        patch.delenv("KTK_BACKEND", raising=False)
        patch.setenv("KTK_SGLANG", variable)
        loaded.registry.reset()
        engine.register()
        assert bool(loaded.registry._hooks) == wanted, (variable, amx)
        patch.setattr(utils, "is_cpu", lambda: False)
        loaded.registry.reset()
        engine.register()
        assert not loaded.registry._hooks, "on a GPU"
    patch.setenv("KTK_SGLANG", "yes")
    with pytest.raises(ValueError, match="KTK_SGLANG must be 0 or 1, got 'yes'"):
        choice.mode()
    patch.setenv("KTK_SGLANG", "")
    patch.setenv("KTK_BACKEND", "AMXINT8")
    assert choice.mode() is Mode.ALWAYS


# --- what of SGLang moves without a word --------------------------------------------------------


def definition(files: Path, name: str) -> ast.FunctionDef:
    """Find a method or a function in a release, by its full name."""
    module, last, function = name.rsplit(".", 2)
    is_method = last[0].isupper()
    path = module if is_method else f"{module}.{last}"
    body = ast.parse(files.joinpath(*path.split(".")).with_suffix(".py").read_text()).body
    if is_method:
        [cls] = [node for node in body if isinstance(node, ast.ClassDef) and node.name == last]
        body = cls.body
    [method] = [
        node for node in body if isinstance(node, ast.FunctionDef) and node.name == function
    ]
    return method


def names(method: ast.FunctionDef) -> list[str]:
    return [argument.arg for argument in method.args.args]


@pytest.mark.parametrize("target", engine.hooks())
def test_hooked_methods_take_the_arguments_of_the_hooks(target: str, mainline: Path) -> None:
    theirs = definition(mainline, target)
    # The hook has the method itself in front, and its object under another name.
    is_method = names(theirs)[0] == "self"
    ours = list(inspect.signature(engine.hooks()[target]).parameters)[1 + is_method :]
    more = {"with_bias"}
    assert [n for n in names(theirs)[is_method:] if n not in more] == [
        n for n in ours if n != "extra"
    ]
    assert (theirs.args.kwarg is not None) == ("extra" in ours)


def test_the_loader_calls_what_the_hook_replaces(mainline: Path) -> None:
    cls = "sglang.srt.layers.moe.fused_moe_triton.layer.FusedMoE"
    theirs = definition(mainline, f"{cls}._weight_loader_impl")
    assert names(theirs)[1:] == [
        "param",
        "loaded_weight",
        "weight_name",
        "shard_id",
        "expert_id",
    ]
    for loader in ("weight_loader", "_weight_loader_physical"):
        calls = [
            node
            for node in ast.walk(definition(mainline, f"{cls}.{loader}"))
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "_weight_loader_impl"
        ]
        assert len(calls) == 1
        assert {keyword.arg for keyword in calls[0].keywords} == set(names(theirs)[1:])


def test_hooks_are_named_as_the_methods() -> None:
    assert len(engine.hooks()) == 3 * 3 + 2 * 2 + 1
    for module in (experts, linears):
        assert module.process_weights_after_loading.__module__ == module.__name__
