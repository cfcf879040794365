"""Experts of vLLM whose weights come again: stand-ins take the place of what is imported."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from schemes import FP8_CONFIG
from vllm_stand_ins import Copied, imported

from ktk import CheckpointError
from ktk.quantize import quantize

E, K, H, I = 4, 2, 128, 128  # noqa: E741
SIZES = {"w1": (I, H), "w3": (I, H), "w2": (H, I)}
Tensors = dict[tuple[str, int], torch.Tensor]
NUMBERS = iter(range(1 << 40, 1 << 41))


@pytest.fixture
def experts(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    with imported("ktk.vllm.experts", monkeypatch) as module:
        yield module


class Layer(torch.nn.Module):
    """A layer of vLLM, and the tensors that a model hands over to it."""

    def __init__(
        self,
        experts: Any,
        quantization: Any = None,
        *,
        rank: int = 0,
        ranks: int = 1,
        expert_map: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        self.layer_name, self.expert_map = f"layers.{next(NUMBERS)}", expert_map
        self.top_k, self.apply_router_weight_on_input = K, False
        self.moe_config = SimpleNamespace(
            is_act_and_mul=True,
            is_lora_enabled=False,
            has_bias=False,
            intermediate_size=I,
            activation=SimpleNamespace(value="silu"),
            swiglu_alpha=None,
            swiglu_limit=None,
            swiglu_beta=None,
            moe_parallel_config=SimpleNamespace(tp_rank=rank, tp_size=ranks),
        )
        kind = experts.KtkUnquantized if quantization is None else experts.KtkExperts
        more = () if quantization is None else (quantization,)
        self.method: Any = kind(self.moe_config, *more)
        local = E if expert_map is None else int((expert_map >= 0).sum())
        self.method.create_weights(
            self,
            local,
            hidden_size=H,
            intermediate_size_per_partition=I // ranks,
            params_dtype=torch.bfloat16,
        )

    def take(self, tensors: Tensors, role: str = "weight") -> None:
        for (shard, expert), tensor in tensors.items():
            param = self.get_parameter(f"{'w2' if shard == 'w2' else 'w13'}_{role}")
            param.weight_loader(  # type: ignore[attr-defined]
                param, tensor, "experts", shard_id=shard, expert_id=expert, return_success=True
            )

    def finish(self) -> Any:
        self.method.process_weights_after_loading(self)
        return self.method._packed.moe

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = torch.randn(ids.shape[0], H, generator=torch.Generator().manual_seed(0)).bfloat16()
        weights = torch.full(ids.shape, 0.5)
        result: torch.Tensor = self.method.apply(self, x, weights, ids)
        return result


IDS = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0]], dtype=torch.int32)


def floats(seed: int) -> Tensors:
    made = torch.Generator().manual_seed(seed)
    return {
        (shard, expert): (torch.randn(size, generator=made) / 8).bfloat16()
        for expert in range(E)
        for shard, size in SIZES.items()
    }


def loaded(experts: Any, seed: int, **options: Any) -> Layer:
    layer = Layer(experts, **options)
    layer.take(floats(seed))
    layer.finish()
    return layer


@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_that_come_again_count_in_the_next_call(experts: ModuleType, ranks: int) -> None:
    layer = loaded(experts, 0, rank=ranks - 1, ranks=ranks)
    graph = layer.method._packed
    for seed in (1, 2):  # as vLLM's examples of learning do: model.load_weights, and nothing else
        layer.take(floats(seed))
        assert torch.equal(layer(IDS), loaded(experts, seed, rank=ranks - 1, ranks=ranks)(IDS))
    assert layer.method._packed is graph
    layer.finish()
    assert torch.equal(layer(IDS), loaded(experts, 2, rank=ranks - 1, ranks=ranks)(IDS))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("first", [None, 0, 2])
def test_a_tensor_may_be_of_all_experts(experts: ModuleType, first: int | None, ranks: int) -> None:
    """As Llama-4's are, cut to those of this rank, with the number of the first."""
    options: dict[str, Any] = {"rank": ranks - 1, "ranks": ranks}
    here = range(E) if first is None else range(first, first + 2)
    if first is not None:
        options["expert_map"] = torch.tensor([e - first if e in here else -1 for e in range(E)])
    for seed in (0, 1):  # loaded, and loaded again
        one_by_one, together = Layer(experts, **options), Layer(experts, **options)
        made = floats(seed)
        one_by_one.take(made)
        together.take(
            {(shard, here[0]): torch.stack([made[shard, e] for e in here]) for shard in SIZES}
        )
        one_by_one.finish()
        together.finish()
        assert torch.equal(together(IDS), one_by_one(IDS))


def test_vllm_need_not_have_a_kernel(experts: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = loaded(experts, 0)(IDS)
    stock = experts.UnquantizedFusedMoEMethod

    def without(self: Any, moe: Any) -> None:
        self.moe = moe
        raise NotImplementedError("no backend supports this")

    monkeypatch.setattr(stock, "__init__", without)
    assert torch.equal(loaded(experts, 0)(IDS), wanted)
    # What ktk does not compute either is vLLM's to refuse.
    monkeypatch.setattr(experts, "unable", lambda layer, quantization: "that")
    with pytest.raises(NotImplementedError, match="no backend supports this"):
        Layer(experts)


def test_a_name_is_that_of_one_layer_at_a_time(experts: ModuleType) -> None:
    layer = loaded(experts, 0)
    before, name = layer(IDS), layer.layer_name
    other = Layer(experts)
    other.method._name, other.method.number = name, layer.method.number
    other.take(floats(1))
    with pytest.raises(RuntimeError, match=rf"^{name} is there already.* give each a process"):
        other.finish()
    assert torch.equal(layer(IDS), before)
    del layer
    other.finish()
    assert torch.equal(other(IDS), loaded(experts, 1)(IDS))


def test_experts_that_do_not_come_again_stay(experts: ModuleType) -> None:
    layer, other = loaded(experts, 0), floats(1)
    layer.take({at: tensor for at, tensor in other.items() if at[1] == 2})
    mixed = Layer(experts)
    mixed.take({at: (other if at[1] == 2 else floats(0))[at] for at in other})
    mixed.finish()
    assert torch.equal(layer(IDS), mixed(IDS))


def test_an_expert_that_came_in_part_is_an_error_until_the_rest_is_there(
    experts: ModuleType,
) -> None:
    layer, other = loaded(experts, 0), floats(1)
    buffer = torch.empty(I, H, dtype=torch.bfloat16)
    for at in (("w1", 2), ("w3", 2)):  # a sender uses its memory again
        layer.take({at: buffer.copy_(other[at])})
    buffer.zero_()
    sentence = r"layers\.\d+: expert 2 is not whole: down weight did not come"
    for _ in range(2):
        with pytest.raises(CheckpointError, match=sentence):
            layer(IDS)
    with pytest.raises(CheckpointError, match=sentence):
        layer.finish()
    layer.take({("w2", 2): other["w2", 2]})
    mixed = Layer(experts)
    mixed.take({at: (other if at[1] == 2 else floats(0))[at] for at in other})
    mixed.finish()
    assert torch.equal(layer(IDS), mixed(IDS))


def test_an_expert_begins_anew_with_a_tensor_that_came_before(experts: ModuleType) -> None:
    layer, given_up = loaded(experts, 0), floats(1)
    layer.take({at: given_up[at] for at in (("w1", 2), ("w3", 2))})
    layer.take(floats(2))
    assert torch.equal(layer(IDS), loaded(experts, 2)(IDS))


def fp8(seed: int) -> tuple[Tensors, Tensors]:
    codes, scales = {}, {}
    for at, tensor in floats(seed).items():
        made = quantize(tensor, "e4m3-f32-128x128")
        assert made.scale is not None
        codes[at], scales[at] = made.data.view(torch.float8_e4m3fn), made.scale
    return codes, scales


def test_real_weights_may_follow_made_up_ones(
    experts: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experts, "loads_dummies", lambda: True)
    layer = Layer(experts, FP8_CONFIG)
    made_up = layer.finish()
    assert layer.finish() is made_up
    assert layer(IDS).isfinite().all()
    codes, scales = fp8(0)
    layer.take(codes)
    with pytest.raises(CheckpointError, match="expert 0 is not whole: gate weight_scale_inv, up"):
        layer(IDS)
    layer.take(scales, "weight_scale_inv")
    monkeypatch.setattr(experts, "loads_dummies", lambda: False)
    read = Layer(experts, FP8_CONFIG)
    read.take(codes)
    read.take(scales, "weight_scale_inv")
    moe = read.finish()
    assert torch.equal(layer(IDS), read(IDS))
    assert str(layer.finish().format) == str(moe.format) != str(made_up.format)
    assert moe.pool is made_up.pool


@pytest.mark.parametrize("local", [E, 1])
def test_vllm_can_count_what_comes_before_it_loads(experts: ModuleType, local: int) -> None:
    expert_map = torch.tensor([-1] * (E - local) + list(range(local)))
    layer = Layer(experts, FP8_CONFIG, expert_map=None if local == E else expert_map)
    codes, scales = fp8(0)
    layer.take(codes)
    layer.take(scales, "weight_scale_inv")
    layer.finish()
    before = layer(IDS)
    kept = dict(layer.named_parameters())
    for name, param in kept.items():
        meta = torch.nn.Parameter(param.data.to("meta"), requires_grad=False)
        meta.__dict__.update(param.__dict__)
        layer.register_parameter(name, meta)
    codes, scales = fp8(1)
    with Copied() as counted:
        layer.take(codes)
        layer.take(scales, "weight_scale_inv")
        layer.take(scales, "input_scale")
    wanted = sum(one.weight_loader_numel for one in kept.values())  # type: ignore[attr-defined]
    assert counted.elements == wanted == 2 * 3 * local
    assert torch.equal(layer(IDS), before)


def test_no_expert_is_none_of_those_here(experts: ModuleType) -> None:
    """An id of -1 pads; the last expert is one of this rank's."""
    layer = loaded(experts, 0, expert_map=torch.tensor([-1, 0, -1, 1], dtype=torch.int32))
    padded = layer(torch.tensor([[-1, -1], [3, -1], [0, 2], [1, 3]], dtype=torch.int32))
    assert not padded[[0, 2]].any()
    whole = loaded(experts, 0)
    ids = torch.tensor([[-1, -1], [3, -1], [-1, -1], [1, 3]], dtype=torch.int32)
    assert torch.equal(padded, whole(ids))
