"""vLLM's models, computed by ktk inside vLLM's own processes, against what they are in float32.

On two idle cores each start of vLLM takes some 13 s, one that compiles 40 s, and one of two workers
34 s: five to six minutes for all of them.
"""

from __future__ import annotations

import os
import re
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import vllm_models as models
from vllm_environment import Generated, Vllm

from ktk.conversion.compressed import TARGETS
from ktk.system import cpu_flags

TOKENS = 8
# bf16 rounds to 8 bits, and the kernels for integers encode activations in 7 bits and a sign beside
# what bf16 rounds: their error is four times as large, and adds to it.
ENCODED = 5
# Two workers, and what they are started with.
TWO: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
# Without it ktk computes codes only where vLLM has no kernels for them: without AMX.
ASKED = {"KTK_VLLM": "1"}
UNBOUND = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


@dataclass
class Model:
    """A model on disk, what it is in float32, and the prompts that it gets."""

    folder: Path
    exact: Any
    prompts: list[list[int]]

    @property
    def most(self) -> float:
        """The error of log probabilities that bf16 makes."""
        return models.rounding(self.exact, self.prompts)


WRITERS: dict[str, models.Write] = {
    "bf16": models.qwen3,
    "fp8": models.stored("fp8 by blocks", "self_attn"),
    "int4": models.stored("int4", "self_attn"),
    "gptq": models.stored("gptq, symmetric"),
    "awq": models.awq,
    **{f"{to} by ktk": models.converted(to) for to in TARGETS},
    "nvfp4 of modelopt": models.stored("nvfp4"),
    "llama-4": models.llama4,
    "gpt-oss": models.gpt_oss,
    "gpt-oss in bf16": models.gpt_oss_bf16,
    "longcat": models.longcat,
}


@pytest.fixture(scope="module")
def model(vllm: Vllm, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    @cache
    def made(name: str) -> Model:
        folder = tmp_path_factory.mktemp("models") / name
        folder.mkdir()
        return Model(folder, WRITERS[name](folder), models.prompts(folder))

    return made


@pytest.fixture(scope="module")
def fp8(vllm: Vllm, model: Callable[[str], Model]) -> Generated:
    """What one process makes of a model in FP8, attention too."""
    found = model("fp8")
    return vllm.generate(found.folder, found.prompts, TOKENS, ASKED)


def assert_right(model: Model, made: Generated, times: float) -> None:
    """Compare log probabilities with those in float32, given the same tokens.

    The median counts: where two experts are as good as each other for a token, rounding may choose
    the other one, and its numbers are others then.
    """
    errors = []
    for ids, tokens, logprobs in zip(model.prompts, made.tokens, made.logprobs, strict=True):
        assert len(tokens) == TOKENS
        expected = models.log_probabilities(model.exact, ids + tokens)
        for i, at in enumerate(logprobs):
            errors += [abs(v - expected[len(ids) - 1 + i, t].item()) for t, v in at.items()]
    assert statistics.median(errors) <= times * model.most


def assert_same(one: Generated, other: Generated, most: float) -> None:
    """Compare tokens: the first that differs must be one of two that are as good as each other."""
    for tokens, others, logprobs in zip(one.tokens, other.tokens, one.logprobs, strict=True):
        differ = [i for i, pair in enumerate(zip(tokens, others, strict=True)) if len({*pair}) > 1]
        if differ:
            at = logprobs[differ[0]]
            assert abs(at[tokens[differ[0]]] - at[others[differ[0]]]) <= most
    same = sum(tokens == others for tokens, others in zip(one.tokens, other.tokens, strict=True))
    assert same >= len(one.tokens) // 2


def test_bf16_gives_the_tokens_of_vllm(vllm: Vllm, model: Callable[[str], Model]) -> None:
    found = model("bf16")
    stock = vllm.generate(found.folder, found.prompts, TOKENS)
    assert "ktk computes" not in stock.log
    made = vllm.generate(found.folder, found.prompts, TOKENS, ASKED)
    assert "ktk computes experts with BF16/" in made.log
    assert_right(found, made, 1.5)
    assert_same(made, stock, 8 * found.most)


def test_a_named_backend_gets_experts_quantized(vllm: Vllm, model: Callable[[str], Model]) -> None:
    found = model("bf16")
    options = {"quantization": "ktk"}
    made = vllm.generate(found.folder, found.prompts, 2, {"KTK_BACKEND": "AMXINT8"}, **options)
    assert "ktk computes experts with AMXINT8/" in made.log
    logprobs = [one[0] for one in made.logprobs]
    for ids, at in zip(found.prompts, logprobs, strict=True):
        assert (
            max(at, key=lambda t: at[t])
            in models.log_probabilities(found.exact, ids)[-1].topk(3).indices
        )


def test_fp8_with_dense_layers_in_fp8(
    vllm: Vllm, model: Callable[[str], Model], fp8: Generated
) -> None:
    assert "ktk computes experts with FP8/" in fp8.log
    # With AMX vLLM has kernels of its own for these.
    assert ("ktk computes dense layers with FP8/" in fp8.log) == ("amx_tile" not in cpu_flags())
    assert_right(model("fp8"), fp8, 1.5)


def test_it_computes_unasked_where_vllm_has_no_kernels(
    vllm: Vllm, model: Callable[[str], Model]
) -> None:
    found = model("fp8")
    made = vllm.generate(found.folder, found.prompts, 2)
    said = re.findall(r"ktk computes what this model stores as \w+", made.log)
    lacks = "amx_tile" not in cpu_flags()
    assert [line.rpartition(" ")[2] for line in said] == ["fp8"] * lacks
    assert ("ktk computes experts with FP8/" in made.log) == lacks


@pytest.mark.parametrize(
    ("name", "backend", "times"),
    [
        ("int4", "RAWINT4", ENCODED),
        ("gptq", "RAWINT4", ENCODED),
        ("awq", "AMXINT4", ENCODED),
        ("int4 by ktk", "RAWINT4", ENCODED),
        ("fp8 by ktk", "FP8", 1.5),
        ("nvfp4 by ktk", "MXFP4", 1.5),
        ("mxfp4 by ktk", "MXFP4", 1.5),
        ("nvfp4 of modelopt", "MXFP4", 1.5),
        ("gpt-oss", "MXFP4", 1.5),
    ],
)
def test_codes_are_computed_as_they_are_stored(
    vllm: Vllm, model: Callable[[str], Model], name: str, backend: str, times: float
) -> None:
    found = model(name)
    made = vllm.generate(found.folder, found.prompts, TOKENS, ASKED)
    assert f"ktk computes experts with {backend}/" in made.log
    assert_right(found, made, times)


@pytest.mark.parametrize("name", ["gpt-oss in bf16", "llama-4"])
def test_tensors_may_be_of_all_experts(
    vllm: Vllm, model: Callable[[str], Model], name: str
) -> None:
    found = model(name)
    made = vllm.generate(found.folder, found.prompts, TOKENS, ASKED)
    assert "ktk computes experts with BF16/" in made.log
    assert_right(found, made, 1.5)


@pytest.mark.parametrize("ranks", [1, 2])
def test_zero_experts_pass_tokens_on(vllm: Vllm, model: Callable[[str], Model], ranks: int) -> None:
    """vLLM alone has no kernel on CPUs for what routes tokens to them."""
    found = model("longcat")
    variables, options = ASKED, {}
    if ranks == 2:
        variables, options = variables | UNBOUND, {**TWO, "enable_expert_parallel": True}
    made = vllm.generate(found.folder, found.prompts, TOKENS, variables, **options)
    assert "ktk computes experts with BF16/" in made.log
    assert_right(found, made, 1.5)


def test_weights_that_vllm_makes_up(vllm: Vllm, model: Callable[[str], Model]) -> None:
    """To measure without a download; what comes is nonsense."""
    found = model("fp8")
    made = vllm.generate(found.folder, found.prompts, 2, ASKED, load_format="dummy")
    assert "ktk computes experts with " in made.log
    assert [len(tokens) for tokens in made.tokens] == [2] * len(found.prompts)


@pytest.mark.parametrize("again", ["load_weights", "reload_weights"])
@pytest.mark.parametrize("name", ["bf16", "fp8", "gpt-oss"])
def test_weights_that_come_after_made_up_ones(
    vllm: Vllm, model: Callable[[str], Model], name: str, again: str
) -> None:
    """As those of models that learn, which a trainer hands over."""
    if again == "load_weights" and "amx_tile" in cpu_flags():
        pytest.skip("with AMX vLLM packs its dense layers, and its own load_weights fails then")
    found = model(name)
    made = vllm.generate(found.folder, found.prompts, TOKENS, ASKED, again, load_format="dummy")
    assert "ktk computes experts with " in made.log
    assert_right(found, made, 1.5)


def test_compiled(vllm: Vllm, model: Callable[[str], Model], fp8: Generated) -> None:
    found = model("fp8")
    for _ in range(2):  # the second time with what vLLM keeps of graphs
        made = vllm.generate(found.folder, found.prompts, TOKENS, ASKED, enforce_eager=False)
        assert "ktk computes experts with FP8/" in made.log
        assert_right(found, made, 1.5)
        assert_same(made, fp8, 8 * found.most)


def pools(log: str) -> list[set[int]]:
    """Return the CPUs that each worker process says its pool has."""
    found = re.findall(r"Worker\S*\s+pid=(\d+).*ktk computes experts .* on CPUs ([\d, ]+)", log)
    each = {pid: {int(cpu) for cpu in cpus.split(",")} for pid, cpus in found}
    return list(each.values())


@pytest.mark.parametrize(
    ("name", "options"),
    [("fp8", {}), ("gpt-oss", {}), ("int4", {"enable_expert_parallel": True})],
    ids=["columns", "columns-of-gpt-oss", "experts"],
)
def test_two_workers(
    vllm: Vllm, model: Callable[[str], Model], name: str, options: dict[str, Any]
) -> None:
    found = model(name)
    made = vllm.generate(
        found.folder,
        found.prompts,
        TOKENS,
        ASKED | UNBOUND,
        **TWO,
        **options,
    )
    assert_right(found, made, ENCODED if name == "int4" else 1.5)
    one, other = pools(made.log)
    if len(os.sched_getaffinity(0)) > 1:
        assert not one & other
