"""tools/check_kernels.py: what it takes for a spill."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import check_kernels

PROLOGUE = ["push %rbp", "mov %rsp,%rbp", "sub $0x128,%rsp"]
LOOP = [
    "vmovaps -0x130(%rbp),%zmm1",
    "vfmadd231ps -0x10(%rax){1to16},%zmm0,%zmm1",
    "vmovaps %zmm1,-0x130(%rbp)",
    "vfmadd231ps -0xc(%rax){1to16},%zmm0,%zmm2",
]


def disassembled(*lines: str) -> list[check_kernels.Instruction]:
    """Return a function of these instructions, whose last part, LOOP, jumps to its beginning."""
    begin = 4 * (len(lines) - len(LOOP))
    texts = [*lines, f"jne {begin:x} <f+{begin:#x}>"]
    return [
        check_kernels.Instruction(4 * i, *text.split(maxsplit=1)) for i, text in enumerate(texts)
    ]


@pytest.mark.parametrize(("before", "spills"), [(PROLOGUE, True), (["push %rbp"], False)])
def test_what_lies_below_a_frame_pointer_is_the_stack(
    before: list[str], spills: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a frame %rbp may point to weights, read at negative offsets."""
    code = disassembled(*before, *LOOP)
    monkeypatch.setattr(check_kernels, "functions", lambda *_: {"f": code})
    loops, found = check_kernels.spill_offences(Path("libktk_x_avx512.a"), "objdump")
    assert loops == 1
    assert bool(found) == spills
    if spills:
        assert "2 stack moves beside 2 products" in found[0]


def test_the_stack_pointer_is_seen_without_a_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    code = disassembled(*(line.replace("-0x130(%rbp)", "0x40(%rsp)") for line in LOOP))
    monkeypatch.setattr(check_kernels, "functions", lambda *_: {"f": code})
    assert check_kernels.spill_offences(Path("libktk_x_avx512.a"), "objdump")[1]
