"""Faults of layers, for ``pytest -p layer_mutants``: ``--ktk-backend layer_mutants:NAME``.

Some are backends of the C files here. The others are layers that no backend could make wrong: the
sound backend has another name for each of them, and layers of it are of the class of that name.

Of each mutant those properties run that it should break; a whole kit for each would take minutes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import ktk
from ktk.testing import dense
from ktk.training import linear_backward

#: Properties that each backend in C breaks, as "module::name", with the extent where there is one.
BACKENDS = {
    "sound": set[str](),
    "few_rows": {"linear::test_a_layer_may_be_as_large_as_those_of_models[tall]"},
    "few_columns": {"linear::test_a_layer_may_be_as_large_as_those_of_models[wide]"},
    "short_depth": {"linear::test_a_layer_may_be_as_large_as_those_of_models[deep]"},
    "leaves_early": {
        "moe::test_layer_is_within_the_propagated_bound",
        "linear::test_dense_layer_is_within_the_propagated_bound",
    },
    "drops_odd_depth": {"linear::test_dense_layer_is_within_the_propagated_bound"},
    "depends_on_place": {
        "moe::test_permuting_tokens_permutes_results",
        "linear::test_a_row_has_the_same_bits_beside_any_others",
    },
    "leaks_nan": {"moe::test_nan_stays_in_its_token", "linear::test_nan_stays_in_its_row"},
    "loses_later_nan": {"linear::test_nan_stays_in_its_row"},
    "unpacks_from_row_zero": {"linear::test_rows_are_looked_up"},
}
#: And each class, by the names that are given below.
LAYERS: dict[str, set[str]] = {}

Class = type[Any]
_classes: dict[str, Class] = {}


def _breaks(*properties: str) -> Callable[[Class], Class]:
    """Note which properties a class breaks."""

    def noted(made: Class) -> Class:
        LAYERS[made.__name__] = set(properties)
        _classes[made.__name__] = made
        # The class is what an entry point of the backend names, too.
        as_backend: Any = made
        as_backend.__ktk_backend__ = staticmethod(lambda: __getattr__("sound").__ktk_backend__())
        return made

    return noted


def _next(result: Any) -> Any:
    """Change the last bit of all numbers, in place."""
    array = result.numpy() if isinstance(result, torch.Tensor) else result
    array[...] = np.nextafter(array, np.float32(np.inf))
    return result


# --- layers of experts ---------------------------------------------------------------------------


@_breaks(
    "moe::test_any_number_of_threads_gives_the_same_bits",
    "train::test_gradients_have_the_same_bits",
)
class counts_threads(ktk.MoE):
    def __call__(self, *call: Any, **keywords: Any) -> Any:
        result = super().__call__(*call, **keywords)
        return _next(result) if self.pool.size == 3 else result

    def backward(self, *call: Any, **keywords: Any) -> Any:
        result = super().backward(*call, **keywords)
        if self.pool.size == 3:
            _next(result.hidden)
        return result


@_breaks("moe::test_shards_agree")
class forgets_a_shard(ktk.MoE):
    def __call__(self, *call: Any, **keywords: Any) -> Any:
        result = super().__call__(*call, **keywords)
        result *= 1 if len(self.shard_widths) < 2 else 0.5
        return result


@_breaks("moe::test_results_are_linear_in_the_routing_weights")
class limits_weights(ktk.MoE):
    def __call__(self, *call: Any, **keywords: Any) -> Any:
        hidden, ids, weights = call
        return super().__call__(hidden, ids, np.clip(weights, -0.5, 0.5), **keywords)


@_breaks("moe::test_skipped_experts_contribute_nothing", "moe::test_no_work_gives_zeros")
class ignores_masks(ktk.MoE):
    def __call__(self, *call: Any, **keywords: Any) -> Any:
        return super().__call__(*call, **(keywords | {"mask": None}))


@_breaks("moe::test_skipped_experts_contribute_nothing", "moe::test_no_work_gives_zeros")
class takes_any_id(ktk.MoE):
    def __call__(self, *call: Any, **keywords: Any) -> Any:
        hidden, ids, weights = call
        return super().__call__(hidden, np.maximum(ids, 0), weights, **keywords)


@_breaks("moe::test_a_repeated_expert_counts_twice")
class counts_experts_once(ktk.MoE):
    def __call__(self, *call: Any, **keywords: Any) -> Any:
        hidden, ids, weights = call
        once = ids.copy()
        for slot in range(1, ids.shape[1]):
            again = (ids[:, :slot] == ids[:, slot : slot + 1]).any(axis=1)
            once[again, slot] = -1
        return super().__call__(hidden, once, weights, **keywords)


@_breaks("moe::test_zero_experts_return_what_goes_in")
class forgets_zero_experts(ktk.MoE):
    def __call__(self, *call: Any, **keywords: Any) -> Any:
        hidden, ids, weights = call
        known = np.where(ids < self.config.num_experts, ids, -1)
        return super().__call__(hidden, known, weights, **keywords)


@_breaks("moe::test_out_is_written_and_nothing_else")
class writes_behind_out(ktk.MoE):
    def __call__(self, *call: Any, **keywords: Any) -> Any:
        if "out" in keywords:
            keywords["out"].base[-1] = 0
        return super().__call__(*call, **keywords)


@_breaks("moe::test_out_is_written_and_nothing_else")
class clears_inputs(ktk.MoE):
    def __call__(self, *call: Any, **keywords: Any) -> Any:
        result = super().__call__(*call, **keywords)
        if "out" in keywords:
            call[0][...] = 0
        return result


@_breaks("moe::test_dtypes_of_the_caller")
class rounds_to_bf16(ktk.MoE):
    def __call__(self, *call: Any, **keywords: Any) -> Any:
        result = super().__call__(*call, **keywords)
        return result.bfloat16().to(result.dtype) if isinstance(result, torch.Tensor) else result


class _Late:
    """A ticket of work that begins when somebody waits for it."""

    done = True

    def __init__(self, work: Callable[[], Any]) -> None:
        self.wait = work


@_breaks("moe::test_submitted_work_gives_the_same_bits")
class reads_late(ktk.MoE):
    def submit(self, *call: Any, **keywords: Any) -> Any:
        return _Late(lambda: self(*call, **keywords))


# --- training and adapters -----------------------------------------------------------------------


@_breaks("train::test_gradients_are_within_the_propagated_bound")
class halves_gradients(ktk.MoE):
    def backward(self, *call: Any, **keywords: Any) -> Any:
        grad, *others = call
        return super().backward(grad * 0.5, *others, **keywords)


@_breaks("train::test_gradients_have_the_same_bits")
class keeps_rounded(ktk.MoE):
    def forward_train(self, *call: Any, **keywords: Any) -> Any:
        result, kept = super().forward_train(*call, **keywords)
        return result, kept if kept is None else kept * 1.01


@_breaks("train::test_an_adapter_adds_what_it_says")
class forgets_scales_of_adapters(ktk.MoE):
    def __call__(self, *call: Any, **keywords: Any) -> Any:
        return super().__call__(*call, **_without_scale(**keywords))

    def forward_train(self, *call: Any, **keywords: Any) -> Any:
        return super().forward_train(*call, **_without_scale(**keywords))


def _without_scale(lora: Any = None, **keywords: Any) -> dict[str, Any]:
    plain = lora if lora is None else dataclasses.replace(lora, scale=1.0)
    return keywords | {"lora": plain}


@_breaks("train::test_tokens_choose_adapters")
class takes_the_first_adapter(ktk.MoE):
    def __call__(self, *call: Any, **keywords: Any) -> Any:
        if "adapter_ids" in keywords:
            keywords["adapter_ids"] = np.minimum(keywords["adapter_ids"], 0)
        return super().__call__(*call, **keywords)


# --- dense layers --------------------------------------------------------------------------------


@_breaks("linear::test_any_number_of_threads_gives_the_same_bits")
class counts_threads_of_rows(ktk.Linear):
    def __call__(self, *call: Any, **keywords: Any) -> Any:
        result = super().__call__(*call, **keywords)
        return _next(result) if self.pool.size == 3 else result


@_breaks("linear::test_shards_agree")
class forgets_a_shard_of_rows(ktk.Linear):
    def __call__(self, *call: Any, **keywords: Any) -> Any:
        result = super().__call__(*call, **keywords)
        result *= 1 if self.shards < 2 else 0.5
        return result


@_breaks("linear::test_parts_share_nothing_but_the_input")
class mixes_parts(ktk.Linear):
    def __call__(self, *call: Any, **keywords: Any) -> Any:
        result = super().__call__(*call, **keywords)
        if len(self.formats) > 1:
            _next(result[..., -1:])
        return result


@_breaks("linear::test_rows_are_looked_up")
class looks_up_neighbours(ktk.Linear):
    def rows(self, *call: Any, **keywords: Any) -> Any:
        (ids,) = call
        return super().rows([max(i - 1, 0) for i in ids], **keywords)


@_breaks("linear::test_dtypes_and_strides_of_the_caller")
class writes_around_out(ktk.Linear):
    def __call__(self, *call: Any, **keywords: Any) -> Any:
        if "out" in keywords:
            keywords["out"]._base[:, -1] = 0
        return super().__call__(*call, **keywords)


@_breaks("linear::test_submitted_work_gives_the_same_bits")
class reads_rows_late(ktk.Linear):
    def submit(self, *call: Any, **keywords: Any) -> Any:
        return _Late(lambda: self(*call, **keywords))


@_breaks("train::test_dense_gradients_are_within_the_propagated_bound")
class halves_gradients_of_rows(ktk.Linear):
    """See `_halved`: the property asks no method of the layer."""


def _halved(backward: Callable[..., Any]) -> Callable[..., Any]:
    def halved(linear: Any, *call: Any) -> Any:
        result = backward(linear, *call)
        result *= 0.5 if isinstance(linear, halves_gradients_of_rows) else 1
        return result

    return halved


# --- plugin --------------------------------------------------------------------------------------

EXPECTED = BACKENDS | LAYERS


def _chooser(sound: Class) -> Callable[..., Any]:
    """Make layers of the class that has the backend's name, if there is one of this kind."""

    def made(backend: Any, *arguments: Any, **keywords: Any) -> Any:
        chosen = _classes.get(backend.name, sound)
        made_of = chosen if issubclass(chosen, sound) else sound
        return made_of(backend, *arguments, **keywords)

    return made


def __getattr__(name: str) -> Any:
    if name.startswith("_") or name not in BACKENDS:
        raise AttributeError(name)
    import mutants  # needs the library

    return getattr(mutants, name)


def pytest_configure() -> None:
    """Let the kit make layers of these classes."""
    from ktk.testing import conformance_train

    vars(ktk).update(MoE=_chooser(ktk.MoE), Linear=_chooser(ktk.Linear))
    vars(conformance_train).update(linear_backward=_halved(linear_backward))


def property_of(item: pytest.Function) -> str:
    """Return the module and the name of a property, as in EXPECTED."""
    name = f"{item.module.__name__.rpartition('_')[2]}::{item.originalname}"
    extent = item.callspec.params.get("extent")
    assert extent is None or extent in dense.EXTENTS
    return f"{name}[{extent}]" if extent else name


def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """Keep what mutants should break, with one activation function, and tell the report.

    Of the sound backend all of that is kept.
    """
    every = set().union(*EXPECTED.values())
    kept: dict[tuple[str, str], pytest.Function] = {}
    for item in items:
        subject: Any = item.callspec.params["subject"]
        mutant = subject.backend.name
        name = property_of(item)
        if name in (EXPECTED[mutant] or every):
            item.user_properties += [("mutant", mutant), ("property", name)]
            kept.setdefault((mutant, name), item)
    items[:] = kept.values()
