"""What a layer could take at best: the larger of two bounds, and what they are measured by."""

from __future__ import annotations

import platform
from dataclasses import dataclass

import pytest

from ktk import _core
from ktk.bench.limits import Limits, measure_limits, roofline, variant_units

X86 = platform.machine() in ("x86_64", "AMD64")
LIMITS = Limits(
    threads=2,
    read_bytes_per_s=40e9,
    peak_ops_per_s={"avx512_bf16": 250e9, "avx512_fma": 500e9, "avx512_vnni": 2000e9},
)


@dataclass(frozen=True)
class Act:
    element: str


@dataclass(frozen=True)
class Variant:
    required_isa: list[str]
    act: Act


def test_limit_is_the_larger_bound() -> None:
    decode = roofline(LIMITS, nbytes=80e6, flops=80e6, units=["avx512_bf16"])
    assert decode.bound == "memory"
    assert decode.seconds == pytest.approx(2e-3)
    prefill = roofline(LIMITS, nbytes=80e6, flops=80e9, units=["avx512_bf16"])
    assert prefill.bound == "compute"
    assert prefill.seconds == pytest.approx(80 / 250)
    assert prefill.fraction(2 * prefill.seconds) == pytest.approx(0.5)


@pytest.mark.skipif(not X86, reason="units are measured on x86-64 only")
def test_limit_takes_the_best_unit_the_instruction_sets_offer() -> None:
    bf16 = Variant(["avx2", "avx512", "avx512_bf16"], Act("bf16"))
    assert LIMITS.peak(variant_units(bf16)) == 500e9, "the f32 unit is the faster one here"
    int8 = Variant(["avx2", "avx512", "avx512_vnni"], Act("i8"))
    assert LIMITS.peak(variant_units(int8)) == 2000e9
    assert "avx512_fma" not in variant_units(int8), "floating-point units do not multiply int8"
    assert variant_units(Variant(["avx2"], Act("f32"))) == ("avx2_fma",)
    assert variant_units(int8, Act("f32")) == ("avx512_fma", "avx2_fma"), "of these weights"
    int16 = variant_units(Variant(["avx2", "avx512", "avx512_vnni"], Act("i16")))
    assert {"avx512_vnni_words", "avx512_bw", "avx512_fma"} < set(int16), "either is possible"
    assert not {"avx512_vnni", "avx512_maddubs"} & set(int16), "they multiply bytes"


@pytest.mark.skipif(not X86, reason="units are measured on x86-64 only")
@pytest.mark.parametrize("isa", [["avx2"], ["avx2", "avx512"]])
def test_codes_of_few_bits_have_a_faster_unit(isa: list[str]) -> None:
    variant = Variant(isa, Act("i8"))
    faster = f"{isa[-1]}_maddubs"
    for element in ("u4", "q4_k", "q6_k"):
        assert variant_units(variant, weights=Act(element))[0] == faster
    for element in ("i8", "q8_0", "iq4_xs"):
        assert not any("maddubs" in one for one in variant_units(variant, weights=Act(element)))
    assert not any("maddubs" in one for one in variant_units(variant)), "it may take i8"
    floats = variant_units(variant, Act("f32"), weights=Act("u4"))
    assert floats == variant_units(variant, Act("f32"))


def test_a_library_may_use_all_that_the_cpu_has() -> None:
    codecs = Variant(["avx2"], Act("i8"))
    best = variant_units(Variant(_core.detected_isa(), Act("i8")))
    assert variant_units(codecs, library=True) == best


def test_unmeasured_units_leave_the_memory_bound() -> None:
    bound = roofline(LIMITS, nbytes=40e9, flops=1e15, units=["amx_bf16"])
    assert (bound.bound, bound.seconds) == ("memory", 1.0)


def test_measured_limits_are_plausible() -> None:
    limits = measure_limits(1, seconds=0.02, rounds=1, buffer_bytes=64 << 20)
    assert limits.threads == 1
    assert 1e8 < limits.read_bytes_per_s < 1e13
    assert all(1e9 < peak < 1e14 for peak in limits.peak_ops_per_s.values()), limits
