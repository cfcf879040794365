"""Check the object code of libraries that are compiled per instruction set.

    check_kernels.py [--nm NM] [--objdump OBJDUMP] [--probes ARCHIVE...] [--others ARCHIVE...]
        [--kernels ARCHIVE...]

Symbols: an archive defines the table of functions that is named like it, perhaps those of other
backends for the same instruction set, and nothing else, above all nothing weak: the linker keeps a
single copy of a weak symbol, and if that copy was compiled for AVX-512 the program dies on a
machine without it. It calls nothing but the memory functions that compilers insert, and tables.

Spills: the innermost loops that multiply must not move vector registers to or from the stack,
but for a constant here and there. gcc 12 keeps an accumulator array there when a loop over it is
not unrolled, which costs more than half of the speed and nothing fails. Between products of AMX
tiles no vector register may move there at all: loads of tiles want all of the ports.

Upper halves: a function of x86-64 that used them, of registers that SSE has, too, does not return
without vzeroupper, because code for SSE that follows is slow then. Compilers insert it; gcc 12
forgets it behind some calls.

Products: which instructions multiply is known from PRODUCT, and a loop of instructions that are
missing there would go unchecked. So kernels without a loop that multiplies are refused, and so are
probes (native/probe) with a loop in registers that does not: whoever adds an instruction set adds
its probe, and learns here that PRODUCT lacks the instruction.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

LOCAL = set("tbdrns")  # nm prints local symbols in lower case
TABLE = set("DR")  # data that is not weak
MAY_CALL = {"memcpy", "memmove", "memset", "_GLOBAL_OFFSET_TABLE_"}
# Of x86-64, then of aarch64.
PRODUCT = re.compile(
    r"v?(tdp\w+|pdpbusd|pdpwssd|dpbf16ps|fn?m(add|sub)\d+[ps]s|pmaddwd|pmaddubsw)$"
    r"|(smmla|sdot|sm(ul|la)l2?|bfmmla|bfdot|fml[as])$"
)
ON_STACK = r"%[xyz]mm\d+.*{0}|{0}.*%[xyz]mm\d+|[qv]\d+.*\[(sp|x29)\b"
STACK = re.compile(ON_STACK.format(r"\(%rsp\)"))
# Where %rbp is the frame pointer, what lies below it is the stack; else it may point to weights.
STACK_OF_FRAME = re.compile(ON_STACK.format(r"(\(%rsp\)|-0x[0-9a-f]+\(%rbp\))"))
UPPER = re.compile(r"%[yz]mm(\d|1[0-5])\b")
JUMP = re.compile(r"j|b$|b\.|cbn?z$|tbn?z$")
LEAST_PRODUCTS = 2  # fewer in a loop: a tail, not a hot loop
PRODUCTS_PER_MOVE = 8  # an accumulator in memory costs two moves a product


@dataclass(frozen=True)
class Instruction:
    """One line of the disassembly."""

    address: int
    name: str
    operands: str

    @property
    def target(self) -> int | None:
        """Where a jump goes."""
        if not JUMP.match(self.name) or "*" in self.operands:
            return None
        # x86: "3a0 <name+0x20>". aarch64 has a register before it: "x3, 3a0 <name+0x20>".
        return int(self.operands.partition("<")[0].split()[-1], 16)


def run(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def table_name(archive: Path) -> str:
    """Return ktk_<backend>_<instruction set>."""
    return archive.stem.removeprefix("lib")


def symbol_offences(archive: Path, tables: set[str], nm: str) -> list[str]:
    expected = table_name(archive)
    target = expected.split("_", 2)[2]
    own = {"_".join([*table.split("_", 2)[:2], target]) for table in tables}
    found, seen = [], False
    for line in run(nm, "--format=posix", archive).splitlines():
        fields = line.split()
        if len(fields) < 2 or line.endswith(":"):
            continue
        symbol, kind = fields[:2]
        if kind == "U":
            if symbol not in MAY_CALL | tables | own:
                found.append(f"{archive.name}: calls {symbol}")
        elif symbol in own and kind in TABLE:
            seen |= symbol == expected
        elif kind not in LOCAL:
            found.append(f"{archive.name}: exports {symbol} ({kind})")
    if not seen:
        found.append(f"{archive.name}: does not define {expected}")
    return found


def functions(archive: Path, objdump: str) -> dict[str, list[Instruction]]:
    """Disassemble; names are those of the symbol table, kept in order."""
    result: dict[str, list[Instruction]] = {}
    current: list[Instruction] = []
    for line in run(objdump, "-d", "--no-show-raw-insn", archive).splitlines():
        if header := re.match(r"[0-9a-f]+ <(.+)>:$", line):
            current = result.setdefault(header[1], [])
        elif code := re.match(r"\s*([0-9a-f]+):\s+(?:\{\w+\} )?([\w.]+)\s*(.*)$", line):
            current.append(Instruction(int(code[1], 16), code[2], code[3]))
    return result


def innermost_loops(code: list[Instruction]) -> list[list[Instruction]]:
    """Bodies between a backward jump and its target that hold no other such body."""
    spans = {(i.target, i.address) for i in code if i.target is not None and i.target <= i.address}
    spans = {s for s in spans if code and s[0] >= code[0].address}
    inner = [s for s in spans if not any(o != s and s[0] <= o[0] and o[1] <= s[1] for o in spans)]
    return [[i for i in code if first <= i.address <= last] for first, last in inner]


def stack_moves(function: list[Instruction], piece: list[Instruction]) -> list[Instruction]:
    """Return the instructions of a piece of a function that move vectors to or from the stack."""
    keeps_frame = any(i.name == "mov" and i.operands == "%rsp,%rbp" for i in function)
    stack = STACK_OF_FRAME if keeps_frame else STACK
    return [i for i in piece if stack.search(i.operands)]


def spill_offences(archive: Path, objdump: str) -> tuple[int, list[str]]:
    """Count the hot loops, and name those that move vectors to or from the stack."""
    loops, found = 0, []
    for name, code in functions(archive, objdump).items():
        for body in innermost_loops(code):
            products = sum(bool(PRODUCT.match(i.name)) for i in body)
            if products < LEAST_PRODUCTS:
                continue
            loops += 1
            moves = len(stack_moves(code, body))
            if moves * PRODUCTS_PER_MOVE > products:
                found.append(
                    f"{archive.name}: {name} at {body[0].address:#x}: "
                    f"{moves} stack moves beside {products} products"
                )
    return loops, found


def straight_pieces(code: list[Instruction]) -> list[list[Instruction]]:
    """Divide a function where it jumps, and where jumps lead."""
    targets = {i.target for i in code}
    pieces: list[list[Instruction]] = [[]]
    for instruction in code:
        if instruction.address in targets:
            pieces.append([])
        pieces[-1].append(instruction)
        if JUMP.match(instruction.name):
            pieces.append([])
    return pieces


def tile_spill_offences(archive: Path, objdump: str) -> list[str]:
    """Name straight code that moves vectors to or from the stack between products of tiles."""
    found = []
    for name, code in functions(archive, objdump).items():
        for piece in straight_pieces(code):
            products = [at for at, i in enumerate(piece) if i.name.startswith("tdp")]
            between = piece[products[0] : products[-1]] if products else []
            moves = stack_moves(code, between)
            if moves:
                found.append(
                    f"{archive.name}: {name} at {moves[0].address:#x}: {len(moves)} stack moves "
                    f"between {len(products)} products of tiles"
                )
    return found


def returns_with_upper_halves(code: list[Instruction]) -> int | None:
    """Return where a function ends with upper halves in use, on any way through it; or None."""
    at = {instruction.address: i for i, instruction in enumerate(code)}
    seen: set[tuple[int, bool]] = set()
    ahead = [(0, False)] if code else []
    while ahead:
        i, in_use = ahead.pop()
        if (i, in_use) in seen or i == len(code):
            continue
        seen.add((i, in_use))
        one = code[i]
        in_use = one.name not in ("vzeroupper", "vzeroall") and (
            in_use or bool(UPPER.search(one.operands))
        )
        leaves = one.target is not None and one.target not in at
        if in_use and (one.name.startswith("ret") or (one.name == "jmp" and leaves)):
            return one.address
        if one.target in at:
            ahead.append((at[one.target], in_use))
        if not one.name.startswith(("ret", "jmp")):
            ahead.append((i + 1, in_use))
    return None


def upper_offences(archive: Path, objdump: str) -> list[str]:
    """Name functions that return with upper halves in use."""
    ends = {n: returns_with_upper_halves(code) for n, code in functions(archive, objdump).items()}
    return [
        f"{archive.name}: {name} at {end:#x}: returns without vzeroupper"
        for name, end in ends.items()
        if end is not None
    ]


def kernel_offences(archive: Path, objdump: str) -> list[str]:
    loops, found = spill_offences(archive, objdump)
    found += tile_spill_offences(archive, objdump)
    found += upper_offences(archive, objdump)
    print(f"{archive.name}: {loops} multiplying loops")
    return found if loops else [*found, f"{archive.name}: no loop multiplies, by PRODUCT"]


def probe_offences(archive: Path, objdump: str) -> list[str]:
    """Name the loops of a probe that never leave the registers and do not multiply."""
    found, multiply = [], False
    for name, code in functions(archive, objdump).items():
        for body in innermost_loops(code):
            if any("(" in i.operands for i in body):
                continue
            if any(PRODUCT.match(i.name) for i in body):
                multiply = True
            else:
                found.append(f"{archive.name}: {name} does not multiply, by PRODUCT")
    return found if multiply or found else [f"{archive.name}: has no loop in registers"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nm", default="nm")
    parser.add_argument("--objdump", default="objdump")
    for kind in ("--kernels", "--probes", "--others"):
        parser.add_argument(kind, nargs="*", type=Path, default=[])
    arguments = parser.parse_args()
    archives = [*arguments.kernels, *arguments.probes, *arguments.others]
    tables = {table_name(archive) for archive in archives}
    problems = []
    for archive in archives:
        problems += symbol_offences(archive, tables, arguments.nm)
    for archive in arguments.kernels:
        problems += kernel_offences(archive, arguments.objdump)
    for archive in arguments.probes:
        problems += probe_offences(archive, arguments.objdump)
    print("\n".join(problems))
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
