"""ktk bench: how it rotates weights, and tiny runs from the outside."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import ktk
from ktk import Format, _core
from ktk.bench import machine
from ktk.bench.accuracy import expected_output
from ktk.bench.inputs import DISTRIBUTIONS, random_experts, routed_calls
from ktk.bench.shapes import SHAPES, find_shape
from ktk.bench.weights import choose_format, recipe
from ktk.cli import app
from ktk.errors import BackendUnsupported
from ktk.formats import label
from ktk.system import last_level_cache_bytes

X86 = platform.machine() in ("x86_64", "AMD64")
KEYS = {
    "backend", "variant", "shape", "tokens", "threads", "seconds", "gb_per_s", "gflop_per_s",
    "limit_seconds", "fraction", "read_gb_per_s", "peak_gflop_per_s", "spread",
}  # fmt: skip
QUICK = [
    *("bench", "--rounds", "2", "--seconds", "0.02", "--threads", "1"),
    *("--rotate", "0", "--noise", "1"),
]

TINY = ["--shape", "tiny"]


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_flops_count_the_three_products(name: str) -> None:
    shape = find_shape(name)
    expected = 6 * 5 * shape.num_experts_per_tok * shape.hidden_size * shape.intermediate_size
    assert shape.flops(5) == expected


def test_experts_without_a_gate_have_two_products() -> None:
    shape = replace(find_shape("tiny"), gated=False, activation="relu2")
    assert shape.flops(5) == 4 * 5 * 2 * 512 * 256
    assert shape.weights_per_expert == 2 * 512 * 256


def test_fewer_experts_are_named_and_checked() -> None:
    shape = find_shape("deepseek-v3").with_experts(32)
    assert (shape.name, shape.num_experts) == ("deepseek-v3-e32", 32)
    with pytest.raises(ValueError, match="8 experts, so 4 are too few"):
        find_shape("deepseek-v3").with_experts(4)
    with pytest.raises(ValueError, match=r"no shape 'qwen'; known: qwen3-30b-a3b"):
        find_shape("qwen")


@pytest.mark.parametrize("tokens", [1, 4])
def test_calls_use_up_all_experts_before_one_comes_again(tokens: int) -> None:
    """A batch must not find in the cache what the one before it read."""
    shape = find_shape("qwen3-30b-a3b")
    calls = routed_calls(shape, tokens)
    seen: list[set[int]] = []
    for call in calls:
        hit = set(call.ids.flatten().tolist())
        assert len(hit) == call.distinct_experts
        assert all(len(set(row)) == shape.num_experts_per_tok for row in call.ids.tolist())
        if sum(map(len, seen)) + len(hit) <= shape.num_experts:
            assert not any(hit & other for other in seen), "an expert came again too early"
        seen.append(hit)
    assert set.union(*seen) == set(range(shape.num_experts))


def test_calls_that_do_not_fit_are_refused_before_they_are_made() -> None:
    with pytest.raises(MemoryError, match="a call with 1000000000000 tokens of tiny takes"):
        routed_calls(SHAPES["tiny"], tokens=10**12)


def test_reference_agrees_with_torch_on_a_dense_layer() -> None:
    """With every expert the same, routing does not matter: the layer is one gated MLP."""
    shape = find_shape("tiny")
    expert = random_experts(shape, 1)[0]
    call = routed_calls(shape, 3)[0]
    x = call.hidden.double()
    hidden = torch.nn.functional.silu(x @ expert.gate.double().T) * (x @ expert.up.double().T)
    expected = hidden @ expert.down.double().T
    got = expected_output(shape, call, lambda _: expert)
    np.testing.assert_allclose(got, expected.numpy(), rtol=1e-6, atol=0)


def test_caches_are_read_from_the_system_files(tmp_path: Path) -> None:
    for cpu in os.sched_getaffinity(0):
        for index, (level, size, shared) in enumerate([(1, "48K", cpu), (3, "32M", "all")]):
            cache = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/cache/index{index}"
            cache.mkdir(parents=True)
            (cache / "level").write_text(f"{level}\n")
            (cache / "size").write_text(f"{size}\n")
            (cache / "shared_cpu_list").write_text(f"{shared}\n")
    assert last_level_cache_bytes(tmp_path) == 32 << 20


def test_disturbed_measurements_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = iter([0.5, 0.2, 0.01])
    monkeypatch.setattr(machine, "CpuWatch", lambda: SimpleNamespace(others=lambda: next(shares)))
    values = iter("abc")
    measured = machine.undisturbed(lambda: next(values), noise=0.05)
    assert (measured.value, measured.others) == ("c", 0.01)
    shares = iter([0.5, 0.2, 0.3])
    values = iter("abc")
    assert machine.undisturbed(lambda: next(values), noise=0.05, tries=3).value == "b"


def run_cli(*arguments: str) -> list[dict[str, Any]]:
    result = CliRunner().invoke(app, [*QUICK, *TINY, *arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.slow
def test_tiny_run_prints_json_lines_that_add_up() -> None:
    lines = run_cli("--backend", "BF16", "--backend", "AMXINT8", "--tokens", "1,16")
    assert [(line["backend"], line["tokens"]) for line in lines] == [
        ("BF16", 1), ("AMXINT8", 1), ("BF16", 16), ("AMXINT8", 16),
    ]  # fmt: skip
    shape = find_shape("tiny")
    for line in lines:
        assert set(line) >= KEYS
        assert line["threads"] == 1
        seconds = line["seconds"]
        assert 1e-7 < seconds < 10
        # The tiny layer lies in a cache, so that the fraction may mean nothing.
        if line["fraction"] is None:
            assert line["doubt"]
        else:
            assert line["fraction"] == pytest.approx(line["limit_seconds"] / seconds)
            assert line["doubt"] is None
            assert line["fraction"] <= 1.1
        assert line["gflop_per_s"] == pytest.approx(shape.flops(line["tokens"]) / seconds / 1e9)
        bound = max(
            line["gb_per_s"] * seconds / line["read_gb_per_s"],
            line["gflop_per_s"] * seconds / line["peak_gflop_per_s"],
        )
        assert line["limit_seconds"] == pytest.approx(bound)
    bytes_of = {line["backend"]: line["gb_per_s"] * line["seconds"] for line in lines[:2]}
    assert 1.6 < bytes_of["BF16"] / bytes_of["AMXINT8"] <= 2.0, (
        "packed bytes are those of the format"
    )


def test_every_variant_runs_by_name() -> None:
    runnable = [v.name for v in ktk.load_backend("BF16").variants if v.runnable]
    lines = run_cli("--backend", "BF16", "--tokens", "2", "--variant", "all")
    assert [line["variant"] for line in lines] == runnable


def test_accuracy_of_a_biased_layer_is_near_its_format() -> None:
    errors = [
        line
        for line in run_cli("--backend", "BF16", "--tokens", "1", "--accuracy")
        if "total" in line
    ]
    assert [line["weights"] for line in errors] == ["gaussian", "heavy-tailed"]
    for line in errors:
        assert line["quantization"] == 0.0
        assert 0 < line["total"] < 0.01


def test_heavy_tails_have_the_variance_of_the_gaussian() -> None:
    shape = find_shape("tiny")
    gaussian, heavy = (
        random_experts(shape, 1, distribution=name)[0].gate.double() * shape.hidden_size**0.5
        for name in DISTRIBUTIONS
    )
    for weights in (gaussian, heavy):
        assert weights.std() == pytest.approx(1, abs=0.03)
    assert gaussian.abs().max() < 6 < heavy.abs().max()


FORMATS = [
    Format("u4", "bf16", "none", 1, 128),
    Format("u4", "f16", "u8", 1, 32),
    Format("u4", "bf16", "none", 1, 32),
    Format("e4m3", "f32", "none", 128, 128),
    Format("e4m3", "f32", "none", 1, 0),
    Format("e4m3", "ue8m0", "none", 1, 32),
    Format("u4", "f16", "f16", 1, 32),
]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, 0), ("g128", 0), ("g32", 2), ("g32-zero", 1), ("zero-G32", 1), ("row", 4),
        ("128x128", 3), ("ue8m0", 5), ("e4m3-ue8m0-g32", 5), ("u4-f16-zero-u8-g32", 1),
        ("u4-f16-zero-f16-g32", 6),
    ],
)  # fmt: skip
def test_formats_are_found_by_words_of_their_label(text: str | None, expected: int) -> None:
    backend = SimpleNamespace(name="ANY", formats=FORMATS)
    assert choose_format(backend, "ANY", text) == FORMATS[expected]  # type: ignore[arg-type]


def test_an_alias_means_its_format() -> None:
    fp8 = SimpleNamespace(name="FP8", formats=FORMATS)
    assert choose_format(fp8, "MXFP8") == FORMATS[5]  # type: ignore[arg-type]
    assert choose_format(fp8, "FP8") == FORMATS[0]  # type: ignore[arg-type]


def test_an_unknown_format_gets_the_list() -> None:
    result = CliRunner().invoke(app, [*QUICK, *TINY, "--backend", "AMXINT8", "--format", "g32"])
    assert result.exit_code == 1
    assert "AMXINT8 has no format 'g32'; it has i8-f32-row" in str(result.exception)


@pytest.mark.slow
def test_tables_name_formats_and_cut_nothing_off() -> None:
    formats = ["--format", "row", "--format", "128x128"]
    arguments = [*QUICK, *TINY, "--backend", "FP8", *formats, "--tokens", "4", "--accuracy"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "…" not in result.stdout
    for words in ("128x128", "e4m3-f32-row", "gaussian weights", "heavy-tailed weights"):
        assert words in result.stdout


def test_all_formats_run_by_label() -> None:
    lines = run_cli("--backend", "AMXINT8", "--tokens", "2", "--format", "all")
    assert [line["format"] for line in lines] == ["i8-f32-row"]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ktk.backends()))
def test_every_backend_and_format_can_be_measured(name: str) -> None:
    try:
        ktk.load_backend(name)
    except BackendUnsupported as error:  # a library is missing
        pytest.skip(str(error))
    lines = run_cli("--backend", name, "--tokens", "1", "--format", "all")
    formats = [label(fmt) for fmt in ktk.load_backend(name).formats]
    # Groups of 256 columns are rows of the tiny shape's down, and may be called that there.
    assert [str(line["format"]).split("+")[0] for line in lines] == formats


def test_floats_are_preferred_to_what_is_quantized() -> None:
    given = [Format("e4m3", "f32", "none", 1, 0), FORMATS[0], Format("f32"), Format("bf16")]
    core = SimpleNamespace(accepts=[(fmt, 0) for fmt in given])
    backend = SimpleNamespace(formats=FORMATS[:2], core=core)
    assert recipe(backend, FORMATS[0]).given == Format("bf16")  # type: ignore[arg-type]
    core.accepts = [(given[0], 0), (FORMATS[0], 0), (FORMATS[1], 1)]
    assert recipe(backend, FORMATS[0]).given == FORMATS[0]  # type: ignore[arg-type]
    assert recipe(backend, FORMATS[1]).given == FORMATS[1]  # type: ignore[arg-type]


def test_table_and_plot_are_made(tmp_path: Path) -> None:
    picture = tmp_path / "roofline.png"
    result = CliRunner().invoke(
        app, [*QUICK, *TINY, "--backend", "BF16", "--tokens", "1,8", "--plot", str(picture)]
    )
    assert result.exit_code == 0, result.output
    assert "reached" in result.stdout
    assert "…" not in result.stdout, "a number was cut off"
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--tokens", "1,x"], 2, "numbers separated by commas"),
        (["--tokens", "0"], 2, "at least one token"),
        (["--shape", "nope"], 2, "no shape 'nope'"),
        (["--plot", "/nowhere/x.png"], 2, "there is no folder /nowhere"),
        (["--plot", "x.jpgg"], 2, ".jpgg is no picture"),
        (["--plot", "/proc/x.png"], 2, "/proc/x.png cannot be written"),
        (["--rotate", "inf"], 2, "wants a number below 1e+09, got inf"),
        (["--rotate", "nan"], 2, "--rotate"),
        (["--seconds", "inf"], 2, "wants a number below 1e+09, got inf"),
        (["--layer", "3"], 2, "needs --checkpoint"),
        (["--checkpoint", ".", "--shape", "tiny", "--accuracy"], 2, "the model decides"),
        (["--backend", "BF16", "--variant", "nope"], 1, "no variant nope"),
        (["--backend", "BF16", "--variant", "avx2", "--variant", "nope"], 1, "no variant nope"),
        (["--backend", "BF16", "--top-k", "2"], 2, "needs --checkpoint"),
        (["--checkpoint", "/nowhere/at/all"], 1, "/nowhere/at/all"),
        (["--backend", "BF16", "--threads", "99999"], 1, "99999 threads are more than the "),
    ],
)
def test_bad_requests_are_named(arguments: list[str], status: int, message: str) -> None:
    result = CliRunner().invoke(app, [*QUICK, *arguments])
    assert result.exit_code == status
    assert message in " ".join(result.stderr.split()) + str(result.exception)


def test_threads_are_held_to_the_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    cpus = len(os.sched_getaffinity(0))
    monkeypatch.setattr(_core, "topology", lambda: {"quota": 0})
    machine.check_threads(cpus)
    with pytest.raises(ValueError, match=f"than the {cpus} CPUs that this process may use"):
        machine.check_threads(cpus + 1)
    monkeypatch.setattr(_core, "topology", lambda: {"quota": 1})
    machine.check_threads(0)
    machine.check_threads(1)
    if cpus > 1:
        with pytest.raises(ValueError, match="than the 1 CPUs that the cgroup's quota pays for"):
            machine.check_threads(2)


def test_threads_are_those_of_ktk_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KTK_THREADS", "1")
    at = QUICK.index("--threads")
    arguments = [*QUICK[:at], *QUICK[at + 2 :], *TINY, "--tokens", "1", "--backend", "BF16"]
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    assert {one["threads"] for one in map(json.loads, result.stdout.splitlines())} == {1}
