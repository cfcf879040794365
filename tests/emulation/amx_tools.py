"""AMX for tests: the software core as a ctypes library, its trap, and an assembler for both."""

from __future__ import annotations

import atexit
import ctypes
import functools
import mmap
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
SYS_ARCH_PRCTL = 158
ARCH_REQ_XCOMP_PERM = 0x1023
XFEATURE_TILE_DATA = 18

# In the order of amx_op.
OPS = (
    "ldtilecfg",
    "sttilecfg",
    "tilerelease",
    "tilezero",
    "tileloadd",
    "tileloaddt1",
    "tilestored",
    "tdpbssd",
    "tdpbsud",
    "tdpbusd",
    "tdpbuud",
    "tdpbf16ps",
)

libc = ctypes.CDLL(None, use_errno=True)

# Set by run_emulated.py once AMX instructions of this process are done in software, by `trap`.
trapped = False
trap: Soft | None = None


def cpu_flags() -> set[str]:
    if platform.machine() != "x86_64":
        return set()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return set(next((line for line in lines if line.startswith("flags")), "").split())


#: What CPUID may hide of a CPU that has it (native/core/cpu.cc), and an instruction of each.
HIDDEN = {
    "avx512_vnni": "vpdpbusd %zmm0, %zmm0, %zmm0",
    "avx512_bf16": "vdpbf16ps %zmm0, %zmm0, %zmm0",
    "avx512_vbmi": "vpermb %zmm0, %zmm0, %zmm0; vgf2p8affineqb $0, %zmm0, %zmm0, %zmm0",
}


@functools.cache
def executes(instruction: str) -> bool:
    """Whether the CPU executes it, whatever CPUID says. Ask for AVX-512 registers first."""
    with tempfile.TemporaryDirectory() as folder:
        source = f'int main(void) {{ __asm__ volatile("{instruction}"); return 0; }}'
        program = Path(folder, "program")
        compiler = ["cc", "-x", "c", "-", "-o", str(program)]
        if subprocess.run(compiler, input=source.encode(), check=False).returncode != 0:
            return False
        return subprocess.run([program], check=False).returncode == 0


def why_not() -> str:
    """The reason for which no AMX code can run here, not even in software; empty if it can."""
    if not shutil.which("cc"):
        return "needs a C compiler, cc"
    missing = {"avx512f", "avx512bw", "avx512vl"} - cpu_flags()
    missing = missing or {isa for isa, code in HIDDEN.items() if not executes(code)}
    return f"the code around AMX needs {', '.join(sorted(missing))}" if missing else ""


@functools.cache
def build() -> Path:
    """Compile core and trap; the file is there as long as the process that asks."""
    folder = Path(tempfile.mkdtemp(prefix="ktk-amx-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    library = folder / "libamx_soft.so"
    flags = "-std=gnu11 -O3 -mavx2 -mfma -ffp-contract=off -frounding-math -fPIC -shared"
    sources = [HERE / "amx_soft.c", HERE / "amx_trap.c"]
    subprocess.run(["cc", *flags.split(), *sources, "-o", library], check=True)
    return library


class Instruction(ctypes.Structure):
    """amx_insn"""

    _fields_ = (
        ("op", ctypes.c_int),
        ("length", ctypes.c_int),
        ("dst", ctypes.c_int),
        ("a", ctypes.c_int),
        ("b", ctypes.c_int),
        ("address", ctypes.c_uint64),
        ("stride", ctypes.c_uint64),
    )


class Soft:
    """The software core, and the trap once it is installed."""

    STATE_BYTES = 8 * 16 * 64 + 64

    def __init__(self, library: Path) -> None:
        self.lib = ctypes.CDLL(os.fspath(library))
        self.lib.amx_execute.restype = ctypes.c_char_p

    def install_trap(self) -> int:
        return int(self.lib.amx_trap_install())

    def counts(self) -> dict[str, int]:
        values = (ctypes.c_uint64 * len(OPS))()
        self.lib.amx_trap_counts(values)
        return dict(zip(OPS, values, strict=True))

    def tile_counts(self) -> np.ndarray:
        """Loads, stores and products of each of the eight tiles: 3 x 8."""
        values = np.zeros((3, 8), np.uint64)
        self.lib.amx_trap_tile_counts(values.ctypes.data_as(ctypes.c_void_p))
        return values.astype(np.int64)

    def decode(self, code: bytes, registers: list[int]) -> Instruction | None:
        instruction = Instruction()
        text = ctypes.create_string_buffer(code + bytes(16))
        regs = (ctypes.c_uint64 * 16)(*registers)
        found = self.lib.amx_decode(text, regs, ctypes.c_uint64(0), ctypes.byref(instruction))
        return instruction if found else None

    def run(self, code: bytes, registers: list[int]) -> str | None:
        """Execute a program of nothing but AMX instructions; the reason if one would fault."""
        state = ctypes.create_string_buffer(self.STATE_BYTES)
        while code:
            instruction = self.decode(code, registers)
            assert instruction is not None, code[:8].hex()
            fault = self.lib.amx_execute(state, ctypes.byref(instruction))
            if fault:
                return str(fault.decode())
            code = code[instruction.length :]
        return None


def can_run_amx() -> bool:
    """Whether this process can execute AMX: trapped, or with the permission of Linux."""
    if trapped:
        return True
    if "amx_tile" not in cpu_flags():
        return False
    answer = libc.syscall(SYS_ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_TILE_DATA)
    return bool(answer == 0)


def deny_amx() -> None:
    """Make every later request of this process and its threads fail, so that AMX traps.

    A seccomp filter of seven instructions: arch_prctl(ARCH_REQ_XCOMP_PERM) gives EPERM.
    """

    class Filter(ctypes.Structure):
        _fields_ = (
            ("code", ctypes.c_uint16),
            ("jt", ctypes.c_uint8),
            ("jf", ctypes.c_uint8),
            ("k", ctypes.c_uint32),
        )

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_uint16), ("filter", ctypes.POINTER(Filter)))

    load, equal, answer = 0x20, 0x15, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_RET|K
    allow, errno_eperm = 0x7FFF0000, 0x00050001
    nr, arg0 = 0, 16  # offsets in struct seccomp_data
    rules = (Filter * 6)(
        Filter(load, 0, 0, nr),
        Filter(equal, 0, 3, SYS_ARCH_PRCTL),
        Filter(load, 0, 0, arg0),
        Filter(equal, 0, 1, ARCH_REQ_XCOMP_PERM),
        Filter(answer, 0, 0, errno_eperm),
        Filter(answer, 0, 0, allow),
    )
    pr_set_no_new_privs, pr_set_seccomp, seccomp_mode_filter = 38, 22, 2
    program = Program(len(rules), rules)
    if libc.prctl(pr_set_no_new_privs, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "PR_SET_NO_NEW_PRIVS")
    if libc.prctl(pr_set_seccomp, seccomp_mode_filter, ctypes.byref(program), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "PR_SET_SECCOMP")


# --- a small assembler: registers by number, as in rax rcx rdx rbx rsp rbp rsi rdi r8..r15 ------

NONE, P66, PF3, PF2 = range(4)


def _vex(
    opcode: int, prefix: int, reg: int, rest: bytes, *, x: int = 0, b: int = 0, v: int = 0
) -> bytes:
    second = (reg < 8) << 7 | (x < 8) << 6 | (b < 8) << 5 | 2
    return bytes([0xC4, second, (~v & 15) << 3 | prefix, opcode]) + rest


def _memory(reg: int, base: int, index: int | None, scale: int, displacement: int) -> bytes:
    """ModRM, SIB and a displacement as short as it can be."""
    sib = {1: 0, 2: 1, 4: 2, 8: 3}[scale] << 6 | (4 if index is None else index & 7) << 3 | base & 7
    if displacement == 0 and base & 7 != 5:
        mod, tail = 0, b""
    elif -128 <= displacement < 128:
        mod, tail = 1, displacement.to_bytes(1, "little", signed=True)
    else:
        mod, tail = 2, displacement.to_bytes(4, "little", signed=True)
    return bytes([mod << 6 | (reg & 7) << 3 | 4, sib]) + tail


def assemble(op: str, *tiles: int, base: int = 0, index: int | None = None, scale: int = 1,
             displacement: int = 0) -> bytes:  # fmt: skip
    """Machine code of one AMX instruction; `tiles` in the order of Intel's syntax."""
    x = index or 0
    memory_ops = {
        "ldtilecfg": (0x49, NONE),
        "sttilecfg": (0x49, P66),
        "tileloadd": (0x4B, PF2),
        "tileloaddt1": (0x4B, P66),
        "tilestored": (0x4B, PF3),
    }
    if op in memory_ops:
        opcode, prefix = memory_ops[op]
        reg = tiles[0] if tiles else 0
        return _vex(
            opcode, prefix, reg, _memory(reg, base, index, scale, displacement), x=x, b=base
        )
    if op == "tilerelease":
        return _vex(0x49, NONE, 0, b"\xc0")
    if op == "tilezero":
        return _vex(0x49, PF2, tiles[0], bytes([0xC0 | tiles[0] << 3]))
    products = {
        "tdpbssd": (0x5E, PF2),
        "tdpbsud": (0x5E, PF3),
        "tdpbusd": (0x5E, P66),
        "tdpbuud": (0x5E, NONE),
        "tdpbf16ps": (0x5C, PF3),
    }
    opcode, prefix = products[op]
    dst, a, b = tiles
    return _vex(opcode, prefix, dst, bytes([0xC0 | dst << 3 | a]), v=b)


def run_native(code: bytes, registers: list[int]) -> None:
    """Run the program on the CPU (or into the trap), with the caller-saved registers given."""
    volatile = [0, 1, 2, 6, 7, 8, 9, 10, 11]
    prologue = b"".join(
        bytes([0x48 | r >> 3, 0xB8 | r & 7]) + registers[r].to_bytes(8, "little") for r in volatile
    )
    text = prologue + code + assemble("tilerelease") + b"\xc3"
    with mmap.mmap(-1, len(text), prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC) as page:
        page.write(text)
        start = ctypes.c_char.from_buffer(page)
        ctypes.CFUNCTYPE(None)(ctypes.addressof(start))()
        del start


# --- what the instructions mean, in numpy --------------------------------------------------------


def config(shapes: dict[int, tuple[int, int]], start_row: int = 0) -> np.ndarray:
    """ldtilecfg's memory: tile -> (rows, bytes per row)."""
    out = np.zeros(64, np.uint8)
    out[0], out[1] = 1, start_row
    for tile, (rows, colsb) in shapes.items():
        out[16 + 2 * tile], out[48 + tile] = colsb, rows
    return out


def model_int8(c: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """c[m, n] += a[m, 4k] x b[k, 4n], modulo 2^32; a and b carry the signedness."""
    k, columns = b.shape[0], b.shape[1] // 4
    depth_major = b.reshape(k, columns, 4).transpose(0, 2, 1).reshape(4 * k, columns)
    product = a.astype(np.int64) @ depth_major.astype(np.int64)
    return (c.astype(np.int64) + product).astype(np.int32)


def _flush(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x)


def _fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """float32 a * b + c rounded once, for a and b from bf16.

    The product has 16 bits, so it is exact in float64. The sum need not be: rounding it to odd
    first makes the second rounding, to float32, the only one that counts.
    """
    product = a.astype(np.float64) * b.astype(np.float64)
    c64 = c.astype(np.float64)
    total = product + c64
    virtual = total - product
    error = (product - (total - virtual)) + (c64 - virtual)
    bits = total.view(np.int64)
    away = np.signbit(error) == np.signbit(total)
    odd = np.where(bits & 1 == 0, np.where(away, bits + 1, bits - 1), bits)
    exact = (error == 0) | ~np.isfinite(error)
    return _flush(np.where(exact, bits, odd).view(np.float64).astype(np.float32))


def model_bf16(c: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """tdpbf16ps: c[m, n] += a[m, 2k] x b[k, 2n], all float32 arrays, a and b of bf16 values."""
    k, columns = b.shape[0], b.shape[1] // 2
    pairs = b.reshape(k, columns, 2)
    chains = []
    with np.errstate(all="ignore"):
        for odd in range(2):
            chain = np.zeros_like(c, np.float32)
            for depth in range(k):
                chain = _fma(
                    _flush(a[:, 2 * depth + odd, None]), _flush(pairs[depth, :, odd]), chain
                )
            chains.append(chain)
        return _flush(_flush(c) + _flush(chains[0] + chains[1]))
