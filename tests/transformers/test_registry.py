"""Every class of experts in transformers is computed by ktk, or stands here with the reason.

The classes are found in the installed transformers (`registry`), so that a family of next year
fails this test until ktk serves it or says why not. `test_coverage` does the same for checkpoints.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from registry import families

from ktk.testing import bounds
from ktk.testing.reference import Expert, bounded_layer
from ktk.transformers.layout import is_experts
from ktk.transformers.modules import describe
from ktk.transformers.packing import pack_module

E, K, HIDDEN, INNER, TOKENS = 4, 2, 64, 32, 9
ZERO = 3  # in families that have zero experts
# By all names that configurations have for them.
SIZES: dict[str, int] = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), E),
    **dict.fromkeys(("moe_num_experts", "num_experts_per_tok", "moe_topk"), K),
    "moe_num_experts": E,
    "hidden_size": HIDDEN,
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "ffn_hidden_size"), INNER),
    "expert_ffn_hidden_size": INNER,
    "zero_expert_num": ZERO,
}
# Not computed by ktk in models of transformers, where these stay what they are. Those of Dbrx,
# JetMoe, Llama4, NllbMoe, Step3p7 and SwitchTransformers are loaded by `ktk.Model.from_checkpoint`
# (`test_loaded_families`).
REASONS = {
    "AriaSharedExpertsMLP": "is computed for every token",
    "DbrxExpertGLU": "is one expert, which DbrxExperts calls",
    "DbrxExperts": "keeps all experts in one matrix and does not take other implementations",
    "InklingSharedExperts": "is computed for every token",
    "JetMoeParallelExperts": "is half an expert: the module around it has the activation",
    "Llama4TextExperts": "computes every expert for every token, routing weights applied before",
    "MuseSparkExperts": "has a norm after each expert",
    "NllbMoeExperts": "is a dictionary of modules without a gate",
    "Step3p7Experts": "takes no other implementation",
    "SwitchTransformersExperts": "is a dictionary of modules without a gate",
}


def configurations(kind: type) -> Iterator[Any]:
    """Yield small configurations of the family of a class, also those inside others."""
    name = kind.__module__.replace("modeling_", "configuration_")
    module: ModuleType = importlib.import_module(name)
    for one in vars(module).values():
        if inspect.isclass(one) and one.__module__ == name and hasattr(one, "model_type"):
            config: Any = one()
            # Sizes may differ from layer to layer; the classes of experts want one.
            config.allow_global_per_layer_attribute_access = True
            for size, value in SIZES.items():
                if hasattr(config, size):
                    many = isinstance(getattr(config, size), list)
                    setattr(config, size, [value] if many else value)
            config._experts_implementation = "eager"
            yield config


def made(kind: type) -> Any:
    """Return a module of the class with random bf16 weights, in float32; None without a way to."""
    more = {"intermediate_size": INNER} if "intermediate_size" in vars_of(kind) else {}
    for config in configurations(kind):
        try:
            module = kind(config, **more)
        except (AttributeError, TypeError):  # of another part of the model
            continue
        if not is_experts(module):
            return None
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_((HIDDEN**-0.5 * torch.randn_like(parameter)).bfloat16())
        return module.eval()
    return None


def vars_of(kind: Any) -> set[str]:
    """Return the names of what a class is made with."""
    return set(inspect.signature(kind.__init__).parameters)


ALL = {name: kind for one in families().values() for name, kind in one.classes.items()}
PAGE = Path(__file__).parents[2] / "docs/checkpoints.md"


def test_reasons_are_of_classes_that_exist() -> None:
    assert len(ALL) > 60
    assert set(REASONS) <= set(ALL)


def test_the_page_counts_them() -> None:
    """As they are in the version that it names; others have other classes."""
    version = ".".join(transformers.__version__.split(".")[:2])
    page = " ".join(PAGE.read_text().split())
    counted = f"{len(ALL) - len(REASONS)} of the {len(ALL)} of transformers {version}"
    assert counted in page or f"of transformers {version} " not in page


@pytest.mark.parametrize("name", ALL)
def test_experts_are_those_of_transformers(name: str) -> None:
    module = made(ALL[name])
    found = None if module is None else describe(name, module)
    if name in REASONS:
        assert found is None, f"ktk computes {name} now: take it off the list"
        pytest.skip(f"{name} {REASONS[name]}")
    assert found is not None, f"ktk computes no {name}: serve it, or say why not"
    x = torch.randn(TOKENS, HIDDEN)
    weights, ids = torch.rand(TOKENS, found.config.num_ids).topk(K)
    experts = [Expert.of(found.layout.expert(module, number)) for number in range(E)]
    with torch.no_grad():
        exact = made(ALL[name]).double()(x.double(), ids, weights.double()).numpy()
        moe = pack_module(found, "BF16").moe
        got = moe(x, ids, weights).numpy()
    [variant] = [one for one in moe.backend.variants if one.name == moe.variant]
    bounded = bounded_layer(
        x.double().numpy(),
        ids.numpy(),
        weights.double().numpy(),
        experts,
        moe.config,
        (variant.act,) * 3,
        moe.shard_widths,
    )
    # Some families compute gates, or all, in float32 in any case: values are below 1, and 300
    # roundings, of sums 64 deep, below 2^-15.
    np.testing.assert_allclose(bounded.value, exact, rtol=0, atol=2**-15)
    bounds.check(got, bounded.value, bounded.error, name)
