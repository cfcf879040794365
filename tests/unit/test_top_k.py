"""Calls may name any number of experts for each token, whatever the layer was made with."""

import pytest
import torch

import ktk

EXPERTS, H, INTER = 6, 64, 96


@pytest.fixture(scope="module")
def moe() -> ktk.MoE:
    torch.manual_seed(0)
    layer = ktk.load_backend("BF16").moe(
        num_experts=EXPERTS, num_experts_per_tok=2, hidden_size=H, intermediate_size=INTER
    )
    gate, up = torch.randn(2, EXPERTS, INTER, H) / H**0.5
    return layer.load(gate, up, torch.randn(EXPERTS, H, INTER) / INTER**0.5)


@pytest.mark.parametrize("tokens", [1, 7, 300])
@pytest.mark.parametrize("k", [1, 3, EXPERTS, 2 * EXPERTS])
def test_further_ids_that_name_nobody_change_no_bit(moe: ktk.MoE, tokens: int, k: int) -> None:
    x = torch.randn(tokens, H)
    ids, weights = torch.randint(0, EXPERTS, (tokens, k)), torch.rand(tokens, k)
    nobody = torch.full((tokens, 3), -1)
    more = torch.cat([ids, nobody], 1), torch.cat([weights, torch.ones(tokens, 3)], 1)
    assert torch.equal(moe(x, ids, weights), moe(x, *more))
    assert torch.equal(moe.submit(x, ids, weights).wait(), moe(x, *more))


def test_experts_add_up_whether_named_in_one_call_or_in_several(moe: ktk.MoE) -> None:
    x, weights = torch.randn(5, H), torch.rand(5, 4)
    ids = torch.stack([torch.randperm(EXPERTS)[:4] for _ in range(5)])
    each = [moe(x, ids[:, i : i + 1], weights[:, i : i + 1]).double() for i in range(4)]
    # Sums in f32 of the same four terms, in another order: 3 roundings each of at most their sum.
    bound = 6 * torch.finfo(torch.float32).eps * sum(one.abs() for one in each)
    assert ((moe(x, ids, weights).double() - sum(each)).abs() <= bound).all()


def test_no_expert_at_all_and_uneven_shapes_are_refused(moe: ktk.MoE) -> None:
    x = torch.randn(2, H)
    with pytest.raises(ValueError, match="at least one expert"):
        moe(x, torch.zeros(2, 0, dtype=torch.int64), torch.zeros(2, 0))
    with pytest.raises(ValueError, match=r"topk_weights must have shape \[2, 3\]"):
        moe(x, torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 2))
