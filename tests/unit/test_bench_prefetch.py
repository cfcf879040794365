"""tools/bench/prefetch: which policy it chooses from given times, and what it prints."""

from __future__ import annotations

import random
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from ktk import _core

sys.path.insert(0, str(Path(__file__).parents[2] / "tools/bench"))

from prefetch.__main__ import main
from prefetch.cases import (
    LINE_PRODUCTS,
    Case,
    cases_of,
    choose_variants,
    either_cases,
    tile_rows,
)
from prefetch.choose import (
    Ratio,
    choose_accumulators,
    choose_decode,
    choose_few,
    choose_in_order,
    decide,
    over_cases,
    rank,
    verdict,
)
from prefetch.policy import ALL_IN_ORDER, CLASSES, Fetch, Policy, candidates, is_done
from prefetch.row import instruction_sets, row
from prefetch.timing import Clock, duel, survey

ROOT = Path(__file__).parents[2]
NEAR, FAR = Fetch(512, 2), Fetch(8192, 2)
TEXT = "few=512:l2,one=8192:l2,pair=16384:l2,many=32768:l2:pages,decode=8192:l1,"
TEXT += "few_products=4,in_order_products=3,pages_products=30,l1_ahead=2048,decode_rows=13,"
TEXT += "accumulators=8"
PRESENT = Policy.parse(TEXT)


def noisy(median: float, *, spread: float, rounds: int = 15, seed: int = 0) -> list[float]:
    chance = random.Random(seed)
    return [median * (1 + spread * chance.uniform(-1, 1)) for _ in range(rounds)]


def test_policies_are_what_the_core_reads_and_writes() -> None:
    assert str(PRESENT) == TEXT
    assert str(Policy.parse(_core.prefetch())) == _core.prefetch()
    _core.set_prefetch(TEXT)
    try:
        assert _core.prefetch() == TEXT
    finally:
        _core.set_prefetch("")


@pytest.mark.parametrize("amx", [False, True])
def test_candidates_are_distinct(amx: bool) -> None:
    tried = candidates(amx=amx, l1_ahead=2048)
    assert len(set(tried)) == len(tried)
    assert {Fetch(0, 2), Fetch(512, 1), Fetch(65536, 2), Fetch(32768, 3, True)} <= set(tried)
    assert Fetch(2048, 3) not in tried, "into L2 and at once into L1"
    assert (Fetch(8192, 3) in tried) is not amx, "tiles of AMX fetch into one cache"
    assert (Fetch(32768, 1, True) in tried) is amx
    assert (Fetch(2048, 3) in candidates(amx=amx, l1_ahead=1024)) is not amx


def test_classes_meet_only_what_their_kernels_do() -> None:
    both, l2 = Fetch(32768, 3, True), Fetch(32768, 2, True)
    assert [is_done(name, both, amx=False) for name in CLASSES] == [True, True, False, False, False]
    assert [is_done(name, l2, amx=False) for name in CLASSES] == [False, False, True, False, False]
    assert all(is_done(name, Fetch(8192, 1), amx=False) for name in CLASSES)
    assert is_done("many", l2, amx=True)


def test_an_interval_is_of_the_median() -> None:
    """Nine values: between the second and the second last, it holds the median in 96 % of cases."""
    values = [0.9, 0.91, 0.92, 0.93, 0.94, 0.95, 0.96, 0.97, 5.0]
    assert Ratio.of(values) == Ratio(0.94, 0.91, 0.97)
    assert Ratio.of([0.8, 1.2]) == Ratio(1.0, 0.8, 1.2)


def test_intervals_hold_the_median_as_often_as_they_say() -> None:
    chance = random.Random(1)
    held = 0
    for _ in range(1000):
        ratio = Ratio.of([chance.lognormvariate(0, 0.1) for _ in range(15)])
        held += ratio.low <= 1 <= ratio.high
    assert held >= 940


def test_a_clear_gain_is_taken() -> None:
    found = verdict(
        NEAR,
        {FAR: {"case": noisy(0.9, spread=0.02)}, Fetch(0, 2): {"case": noisy(1.1, spread=0.02)}},
        {"case": noisy(1, spread=0.02)},
    )
    assert found.best == found.choice == FAR
    assert found.is_better


@pytest.mark.parametrize(
    ("gain", "spread", "itself"),
    [
        (0.995, 0.001, 0.001),  # real, but too little for a row
        (0.97, 0.2, 0.001),  # the interval holds 1
        (0.96, 0.01, 0.2),  # the present policy differs as much from itself
        (1.05, 0.001, 0.001),
    ],
)
def test_noise_changes_nothing(gain: float, spread: float, itself: float) -> None:
    found = verdict(
        NEAR,
        {FAR: {"case": noisy(gain, spread=spread)}},
        {"case": noisy(1, spread=itself, seed=5)},
    )
    assert not found.is_better
    assert found.choice == NEAR
    assert decide(PRESENT, {"few": found}, PRESENT.few_products) == PRESENT


def test_noise_alone_is_hardly_ever_a_gain() -> None:
    """Of three candidates no better than the present policy the luckiest one is looked at."""
    wrong = 0
    for seed in range(300):
        tried = {
            Fetch(512 << i, 2): {"case": noisy(1, spread=0.05, seed=10 * seed + i)}
            for i in range(1, 4)
        }
        itself = {"case": noisy(1, spread=0.05, seed=10 * seed + 9)}
        wrong += verdict(NEAR, tried, itself).is_better
    assert wrong <= 9


def test_a_class_is_judged_over_all_its_cases() -> None:
    mixed = {"a": noisy(0.9, spread=0.01), "b": noisy(1.12, spread=0.01)}
    itself = {"a": noisy(1, spread=0.01), "b": noisy(1, spread=0.01)}
    assert not verdict(NEAR, {FAR: mixed}, itself).is_better
    assert over_cases([[0.5, 1.0], [2.0, 1.0]]) == [1.0, 1.0]


def test_candidates_are_ranked_over_cases() -> None:
    surveyed = [{NEAR: 0.9, FAR: 1.0}, {NEAR: 1.3, FAR: 1.0}]
    assert rank(surveyed) == [FAR, NEAR]


def test_few_products_is_where_the_best_candidate_changes() -> None:
    near, far = {NEAR: 0.8, FAR: 1.0}, {NEAR: 1.0, FAR: 0.8}
    assert choose_few({1: [near], 2: [near], 8: [near], 16: [far]}, present=4) == 8
    assert choose_few({1: [near], 2: [far], 8: [far]}, present=4) == 1
    slightly = {NEAR: 0.999, FAR: 1.0}
    assert choose_few({1: [near], 4: [near], 8: [slightly], 16: [far]}, present=4) == 4
    assert choose_few({1: [near], 2: [near]}, present=4) == 4, "one class is not compared"


def test_the_order_of_use_changes_where_times_cross() -> None:
    follows, computes = (1.1, 1.0), (1.0, 1.2)
    cases = {1: [follows], 2: [follows, (1.0, 1.02)], 8: [computes], 16: [computes]}
    assert choose_in_order(cases, present=ALL_IN_ORDER) == 2
    assert choose_in_order({1: [computes], 2: [computes]}, present=ALL_IN_ORDER) == 0
    assert choose_in_order({1: [follows], 2: [follows]}, present=0) == ALL_IN_ORDER
    assert choose_in_order({1: [(1.0, 1.005)], 2: [(1.0, 1.0)]}, present=1) == 1, "too little"
    assert choose_in_order({}, present=3) == 3


def test_weights_are_decoded_once_from_where_that_gains() -> None:
    slower, faster = (1.0, 1.1), (1.0, 0.9)
    mixed = {6: [slower], 13: [slower, (1.0, 0.95)], 24: [faster] * 2}
    assert choose_decode(mixed, present=0) == 24
    assert choose_decode({6: [slower], 13: [slower] * 2, 24: [slower]}, present=13) == 0
    assert choose_decode({6: [(1.0, 1.001)], 24: [(1.0, 0.999)]}, present=13) == 13
    assert choose_decode({}, present=13) == 13


def test_accumulators_are_those_with_which_tiles_of_rows_gain() -> None:
    assert choose_accumulators({8: [1.0, 1.0], 10: [0.86, 1.01]}, present=8) == 10
    assert choose_accumulators({8: [1.0, 1.0], 10: [0.998, 0.999]}, present=8) == 8
    assert choose_accumulators({8: [0.95, 0.99], 10: [1.0, 1.0]}, present=10) == 8
    assert choose_accumulators({8: [], 10: []}, present=9) == 9


def test_a_border_moves_only_if_the_class_that_grows_gains() -> None:
    gain = verdict(NEAR, {FAR: {"c": noisy(0.8, spread=0.01)}}, {"c": [1.0] * 15})
    none = verdict(FAR, {NEAR: {"c": noisy(1.0, spread=0.01)}}, {"c": [1.0] * 15})
    moved = decide(PRESENT, {"few": gain, "one": none}, few_products=8)
    assert (moved.few, moved.one, moved.few_products) == (FAR, FAR, 8)
    assert decide(PRESENT, {"few": none, "one": gain}, few_products=8) == PRESENT
    assert decide(PRESENT, {"few": none, "one": gain}, few_products=2).few_products == 2


def test_a_row_is_the_initializer_of_the_table() -> None:
    text = row(PRESENT, ("GenuineIntel", 6, 207), "KTK_ISA_AVX512", ["few 0.9"])
    assert text == (
        "    // few 0.9\n"
        '    {"NAME", "GenuineIntel", 0x6, 0xcf, 0xcf, KTK_ISA_AVX512,\n'
        "     policy(4, 3, 13, {512, 2, kInOrder}, {8192, 2, kInOrder}, {16384, 2, kInOrder}, "
        "{32768, 2, kByPages}, {8192, 1, kInOrder})},"
    )
    everywhere = replace(PRESENT, in_order_products=ALL_IN_ORDER)
    assert "policy(4, kAll, 13, {" in row(everywhere, ("", 0, 0), "KTK_ISA_NEON", [])
    assert "policy(4, 3, kNever, {" in row(replace(PRESENT, decode_rows=0), ("", 0, 0), "kAmx", [])
    waiting = row(replace(PRESENT, accumulators=10), ("", 0, 0), "kAmx", [])
    assert waiting.endswith("{8192, 1, kInOrder}, 10)},")
    always = row(replace(PRESENT, pages_products=64), ("", 0, 0), "kAmx", [])
    assert always.endswith("{8192, 1, kInOrder}, 8, 64)},")
    nearer = row(replace(PRESENT, l1_ahead=1024), ("", 0, 0), "kAmx", [])
    assert nearer.endswith("{8192, 1, kInOrder}, 8, 30, 1024)},")
    assert "kAnyModel, KTK_ISA_NEON," in row(PRESENT, ("", 0, 0), "KTK_ISA_NEON", [])


@pytest.mark.parametrize(
    ("allowed", "isa"),
    [
        (["avx2", "avx512", "amx_int8", "amx_bf16"], "kAmx"),
        (["avx2", "avx512", "amx_int8"], "KTK_ISA_AVX512"),
        (["avx2"], "KTK_ISA_NONE"),
        (["neon", "dotprod"], "KTK_ISA_NEON"),
    ],
)
def test_a_row_is_for_the_sets_that_it_was_measured_with(allowed: list[str], isa: str) -> None:
    assert instruction_sets(allowed) == isa


def variant(
    name: str, ukernels: list[tuple[str, int]], *, runnable: bool = True
) -> SimpleNamespace:
    return SimpleNamespace(name=name, ukernels=ukernels, runnable=runnable)


def test_cases_tell_the_classes_apart() -> None:
    found = list(cases_of("BF16", variant("avx512", [("gemm_12x32_avx512", 2**64 - 1)])))
    assert [(case.rows, case.kind, case.products) for case in found] == [
        (1, "single", 2),
        (2, "single", 4),
        (4, "single", 8),
        (8, "single", 16),
        (12, "single", 24),
        (24, "pair", 0),
        (48, "many", 0),
    ]
    assert tile_rows("amx") is None
    assert not list(cases_of("BF16", variant("avx512", [("amx", 2**64 - 1)])))


def test_rows_of_another_kernel_are_left_out() -> None:
    amx = variant("amx_int8", [("gemm_4x32_avx512_vnni", 4), ("gemm_32x32_amx_int8", 2**64 - 1)])
    rows = [case.rows for case in cases_of("AMXINT8", amx) if case.kind == "single"]
    assert rows == [8, 32]


def test_what_a_variant_decodes_in_either_way() -> None:
    variants = [variant("amx_bf16", [], runnable=False), variant("avx512", []), variant("avx2", [])]
    assert [case.rows for case in either_cases("FP8", variants)] == [6, 13, 24, 48, 96]
    assert not list(either_cases("BF16", variants))
    assert not list(either_cases("FP8", variants[2:]))


def test_variants_that_decode_are_for_one_class() -> None:
    variants = [variant("amx_bf16", [], runnable=False), variant("avx512", []), variant("avx2", [])]
    [found] = choose_variants("FP8", variants)
    assert {case.kind for case in cases_of("FP8", found)} == {"decode"}
    assert [one.name for one in choose_variants("BF16", variants)] == ["avx512"]


#: Where the kernels of LINE_PRODUCTS say it.
LINE_SOURCES = {
    ("BF16", "amx_bf16"): "amx_tile.h",
    ("BF16", "avx512_bf16"): "zmm_bf16.h",
    ("BF16", "avx512"): "zmm_f32.h",
    ("BF16", "avx2"): "ymm_tile.h",
    ("BF16", "arm_bf16"): "neon_bf16.h",
    ("BF16", "neon"): "neon_f32.h",
    ("AMXINT8", "amx_int8"): "amx_kernel.h",
    ("AMXINT8", "avx512_vnni"): "vnni512.h",
}


@pytest.mark.skipif(not (ROOT / "backends").exists(), reason="reads ktk's source tree")
def test_products_of_a_line_are_those_of_the_kernels() -> None:
    said = {}
    for (backend, name), source in LINE_SOURCES.items():
        folder = ROOT / "backends" / backend.lower()
        kernel = f"kernel_{name}.cc"
        assert source in (kernel, *re.findall(r'#include ".*/(.*)"', (folder / kernel).read_text()))
        [number] = re.findall(r"kLineProducts = (\d+);", (folder / source).read_text())
        said[backend, name] = int(number)
    assert said == LINE_PRODUCTS


def test_a_backend_that_is_not_there_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["prefetch", "--backends", "NOPE", "--threads", "1"])
    assert main() == 1
    assert "prefetch: no backend 'NOPE'" in capsys.readouterr().err


def test_turns_compare_what_they_say() -> None:
    """A stub that is slower under one policy: no layers and no measuring."""
    clock = Clock(lambda: None, seconds=0)
    times = {"": 1.0, "few=512:l2,one=512:l2": 0.5, "few=8192:l2,one=8192:l2": 2.0}
    clock.sample = lambda setting: times[setting]  # type: ignore[method-assign]
    near, far = list(times)[1:]
    found = duel(clock, [near, far], rounds=4)
    assert found.ratios == [[0.5] * 4, [2.0] * 4]
    assert survey(clock, {NEAR: near, FAR: far}, rounds=3) == {NEAR: 0.4, FAR: 1.6}


def test_a_sample_runs_under_its_policy_and_restores_the_other() -> None:
    before, seen = _core.prefetch(), []
    clock = Clock(lambda: seen.append(_core.prefetch()), seconds=0)
    clock.sample("few=64:l1")
    assert seen[-1].startswith("few=64:l1,")
    assert _core.prefetch() == before


def test_a_case_says_what_it_is() -> None:
    assert str(Case("BF16", "avx512", 8, "single", 16)) == "BF16 avx512, 8 rows"
