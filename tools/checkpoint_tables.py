#!/usr/bin/env python3
"""Writes the tables of docs/checkpoints.md from the tables that ktk itself reads checkpoints by.

    python tools/checkpoint_tables.py            # write them
    python tools/checkpoint_tables.py --check    # say whether they are current; status 1 if not

A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``; what is around is written by
hand. Needs ktk installed on x86-64, whose build has the backends.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from difflib import unified_diff
from itertools import product
from pathlib import Path

import torch

from ktk import Format
from ktk.backend import Backend
from ktk.checkpoint.config import REFUSED
from ktk.checkpoint.gguf import architectures
from ktk.checkpoint.quantization import Quantization
from ktk.checkpoint.safetensors.families import FAMILIES, Family
from ktk.checkpoint.safetensors.scheme import (
    ANY,
    FLOAT,
    Header,
    Layout,
    Part,
    Scheme,
    StorageError,
)
from ktk.checkpoint.safetensors.storage import PLAIN, SCHEMES
from ktk.config import ACTIVATIONS, SPELLINGS
from ktk.errors import BackendUnsupported
from ktk.formats import FLOATS, is_blocks, label
from ktk.loading.finer import finer_formats
from ktk.names import PREFERRED
from ktk.registry import backends, open_backend

PAGE = Path(__file__).parents[1] / "docs/checkpoints.md"
GROUPS = (16, 32, 64, 128, 256, 0)
BITS = (4, 8)
# Rows and columns that share a scale.
BLOCKS = ((128, 128), (32, 32))
# Rows and columns of the matrix that schemes are tried with: a multiple of all groups.
SIZE = 512
# As safetensors spells them.
DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
_DECODED = "`BF16`, decoded"
# Zero points that are the middle of four bits, in every nibble of a word.
MIDDLE = torch.tensor(0x88888888 - (1 << 32), dtype=torch.int32)


def rows(head: Iterable[str], body: Iterable[Iterable[str]]) -> str:
    """Return a table in Markdown."""
    head = list(head)
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def code(words: Iterable[str]) -> str:
    """Return words as code, with commas."""
    return ", ".join(f"`{word}`" for word in words)


def installed() -> list[Backend]:
    """Return ktk's backends that need no library of the machine, so that every machine says so."""
    found = []
    for info in backends().values():
        if info.distribution != "ktk":
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                backend = open_backend(info)
        except BackendUnsupported:  # of another architecture, or without its library
            continue
        if backend.library is None:
            found.append(backend)
    return found


# --- families -----------------------------------------------------------------------------------


def family_rows() -> Iterator[list[str]]:
    """Yield the naming schemes: what tensors are called, their axes, and whose they are."""
    for family in FAMILIES:
        if any(one.fused for one in family.parts.values()):
            how = "all experts in one: " + ", ".join(
                f"{part.replace('_', ' and ')} [{one.axes.replace(' ', ', ')}]"
                for part, one in family.parts.items()
            )
        else:
            how = "each on its own"
        yield [code([names(family)]), how, family.models]


def names(family: Family) -> str:
    """Return the names of gate, up and down with what differs in braces."""
    stems = [one.name.removesuffix(".weight") for one in family.parts.values()]
    before, last = zip(*(stem.rpartition(".")[::2] for stem in stems), strict=True)
    assert len(set(before)) == 1, "gate, up and down stand in different modules"
    where = f"{before[0]}." if before[0] else ""
    return where + "{" + ",".join(last) + "}"


# --- formats ------------------------------------------------------------------------------------


def formats_of(scheme: Scheme) -> list[Format]:
    """Return what a scheme may hold, by reading matrices of zeros stored so in every way."""
    found: dict[str, Format] = {}
    if scheme.tell is not None:
        return [fmt for fmt in told(scheme) if fmt != FLOAT]
    for layout in layouts(scheme):
        for tensors in stored(scheme, layout):
            with suppress(StorageError):
                fmt = scheme.decode(tensors, layout).format
                # f32 are codes of no format, which the page has words for.
                if fmt is not None and (scheme is PLAIN or fmt != FLOAT):
                    found[label(fmt)] = fmt
    return list(found.values())


def told(scheme: Scheme) -> Iterator[Format]:
    """Yield what a scheme says that matrices become: 4-bit codes in bytes, a row for each group."""
    assert scheme.tell is not None
    layout = Layout(SIZE, SIZE, 0, Quantization())
    inexact = torch.tensor(1 / 3)  # in anything but f32
    for dtype, group in product(scheme.tensors["scale"].dtypes, GROUPS):
        rows = SIZE * SIZE // (group or SIZE)
        headers = {
            "data": Header("U8", (rows // 2, group or SIZE)),
            "scale": Header(dtype, (rows, 1)),
            "zero": Header(dtype, (rows, 1)),
        }
        if group:
            headers["group"] = Header("I32", ())
        yield scheme.tell(headers, layout, lambda _: inexact).format


def layouts(scheme: Scheme) -> Iterator[Layout]:
    """Yield sizes that a scheme may be stored in."""
    shapes = " ".join(part.shape for part in scheme.tensors.values())
    grouped = "G" in shapes or "Z" in shapes
    for block, bits, group, symmetric in product(
        BLOCKS if "B" in shapes else BLOCKS[:1],
        BITS if "b" in shapes else BITS[:1],
        GROUPS if grouped else (0,),
        (True, False) if "zero" in scheme.tensors and grouped else (True,),
    ):
        quantization = Quantization(
            group_size=group, symmetric=symmetric, block=block, zero_offset=0
        )
        yield Layout(SIZE, SIZE, group, quantization, bits)


def stored(scheme: Scheme, layout: Layout) -> Iterator[dict[str, torch.Tensor]]:
    """Yield tensors of a matrix, with all types that its elements and scales may have."""
    parts = {
        role: part
        for role, part in scheme.tensors.items()
        if not part.optional or (role == "zero" and not layout.quantization.symmetric)
    }
    varied: list[str] = [role for role in ("data", "scale") if role in parts]
    for dtypes in product(*(parts[role].dtypes for role in varied)):
        chosen = dict(zip(varied, dtypes, strict=True))
        yield {
            role: empty(role, part, chosen.get(role, part.dtypes[0]), layout)
            for role, part in parts.items()
        }


def empty(role: str, part: Part, dtype: str, layout: Layout) -> torch.Tensor:
    """Return a tensor without content, or with the zero points of symmetric codes."""
    shape = [0 if extent == ANY else extent for extent in layout.shapes(part)[0]]
    made = torch.zeros(shape, dtype=DTYPES[dtype])
    return MIDDLE.expand(made.shape).contiguous() if role == "zero" and dtype == "I32" else made


def short(formats: list[Format]) -> str:
    """Return labels of formats, those that differ by columns alone in one."""
    labels: dict[str, list[str]] = {}
    for fmt in formats:
        head, dash, last = label(fmt).rpartition("-g")
        if dash:
            labels.setdefault(head, []).append(last)
        else:
            labels.setdefault(label(fmt), [])
    return code(
        f"{head}-g{{{','.join(groups)}}}" if len(groups) > 1 else "-g".join([head, *groups])
        for head, groups in labels.items()
    )


def takers(fmt: Format, known: list[Backend]) -> tuple[str, ...]:
    """Return the backends that keep a format as it is; floats are rounded to bf16 at most."""
    able = {backend.name for backend in known if keeps(backend, fmt)}
    first = [name for name in PREFERRED.get(fmt.element, ()) if name in able]
    return (*first, *sorted(able.difference(first)))


def keeps(backend: Backend, fmt: Format) -> bool:
    """Whether a backend takes a format, if need be in finer groups, and stores it as it is."""
    if any(is_blocks(one) for one in backend.formats):
        return False  # its floats are those of GGUF files
    alike = {label(one) for one in (fmt, *finer_formats(fmt, backend.accepts))}
    for given, index in backend.core.accepts:
        kept = backend.formats[index]
        rounded = fmt.element in FLOATS and kept.element == "bf16"
        if label(given) in alike and (label(kept) == label(given) or rounded):
            return True
    return False


def format_rows(known: list[Backend]) -> Iterator[list[str]]:
    """Yield how matrices are stored, and who loads them as they are; the first is the default."""
    for scheme in SCHEMES:
        groups: dict[tuple[str, ...], list[Format]] = {}
        for fmt in formats_of(scheme):
            groups.setdefault(takers(fmt, known), []).append(fmt)
        tensors = code(part.suffix for part in scheme.tensors.values() if not part.optional)
        if not groups or scheme.tell is not None:
            yield [scheme.found, tensors, "codes of its own", _DECODED]
        for able, formats in sorted(groups.items(), key=lambda one: not one[0]):
            loaded = code(able) or _DECODED
            yield [scheme.found, tensors, short(formats), loaded]


# --- the other tables ---------------------------------------------------------------------------


def backend_rows(known: list[Backend]) -> Iterator[list[str]]:
    """Yield what backends store, and what they take besides."""
    for backend in known:
        own = set(map(label, backend.formats))
        more = {label(one): one for one in backend.accepts if label(one) not in own}
        yield [code([backend.name]), short(backend.formats), short(list(more.values()))]


def block_types(known: list[Backend]) -> str:
    """Return the types of GGUF files that are computed as blocks."""
    return code(fmt.element.upper() for one in known for fmt in one.formats if is_blocks(fmt))


def architecture_rows() -> Iterator[list[str]]:
    """Yield activation functions, and the architectures of GGUF files that have them."""
    groups: dict[str, list[str]] = {}
    for name, activation in architectures.ACTIVATIONS.items():
        groups.setdefault(SPELLINGS.get(activation, activation), []).append(name)
    for activation, found in groups.items():
        yield [code([activation]), code(sorted(found))]


def activation_rows() -> Iterator[list[str]]:
    """Yield activation functions, and what config.json calls them."""
    for name in ACTIVATIONS:
        yield [code([name]), code([name, *(one for one in SPELLINGS if SPELLINGS[one] == name)])]


def tables() -> dict[str, str]:
    """Return all tables by name."""
    known = installed()
    return {
        "families": rows(["experts are named", "stored", "by"], family_rows()),
        "formats": rows(
            ["files of", "tensors of a matrix", "format", "loaded as it is by"], format_rows(known)
        ),
        "backends": rows(["backend", "stores", "also takes, and quantises"], backend_rows(known)),
        "activations": rows(["function", "called in config.json"], activation_rows()),
        "refused": rows(
            ["`model_type`", "in the way: it"], ([code([one]), why] for one, why in REFUSED.items())
        ),
        "blocks": block_types(known),
        "architectures": rows(["function", "`general.architecture`"], architecture_rows()),
    }


def written(page: str, made: dict[str, str]) -> str:
    """Return a page with its tables replaced."""
    for name, text in made.items():
        before, begin, rest = page.partition(f"<!-- table: {name} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        if not (begin and end):
            raise SystemExit(f"{PAGE} has no place for the table {name}")
        page = f"{before}{begin}\n{text}\n\n{end}{after}"
    return page


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 if outdated")
    options = parser.parse_args()
    before = PAGE.read_text()
    after = written(before, tables())
    if options.check:
        difference = unified_diff(before.splitlines(), after.splitlines(), "is", "should be", n=0)
        print("\n".join(difference), end="")
        return int(before != after)
    PAGE.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
