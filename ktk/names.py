"""Names of backends that ktk itself says: one table for each use, and no such name anywhere else.

A backend is found by its entry point, so nothing has to be added here for one to be loaded,
benchmarked or tested. What stands here are preferences and other programs' words.

An alias is no backend. `ktk.load_backend` returns the backend it stands for, the first of its list
that is installed and can run on this machine; where a package registers a backend under the same
name, that one is taken. What a layer is stored as follows from the weights that are loaded into it,
so `format` matters only where there are none of its kind yet: it says which weights `ktk bench`
makes, and what floats become for a backend that takes codes only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ktk._core import Format

#: What messages show as a name.
EXAMPLE = "BF16"

# --- which backend computes a checkpoint ---------------------------------------------------------

#: The element that weights are stored in, and backends in order of preference: the first one that
#: stores all of a layer losslessly is taken. Of two that do, RAWINT4 has a scale for each 32 values
#: of an activation, AMXINT4 for 128.
PREFERRED: Mapping[str, tuple[str, ...]] = {
    "bf16": ("BF16",),
    "f16": ("BF16",),
    "f32": ("BF16",),
    "e4m3": ("FP8",),
    "e2m1": ("MXFP4",),
    "u4": ("RAWINT4", "AMXINT4"),
    "i8": ("AMXINT8",),
}
#: For all other elements, which are blocks of ggml.
BLOCKS = ("LLAMAFILE",)
#: For what none of these takes as it is, and is decoded to floats: bf16 loses least.
DECODED = ("BF16",)

#: Stores bf16 weights in fewer bits where their exponents allow it: `ktk inspect --escapes`.
FEWER_BITS = "BF16Z"

# --- kt-kernel's methods -------------------------------------------------------------------------

#: The method that KTMoEWrapper has by default, as there.
KT_METHOD = "AMXINT4"
#: The methods whose weights can be written for GPUs, and what these are.
KT_WRITTEN: Mapping[str, tuple[Format, ...]] = {
    "BF16": (Format("bf16"),),
    "FP8": (Format("e4m3", "f32", "none", 128, 128),),
    "FP8_PERCHANNEL": (Format("e4m3", "f32", "none", 1, 0),),
    "RAWINT4": tuple(Format("u4", "bf16", "none", 1, group) for group in (32, 64, 128, 256)),
    "MXFP4": (Format("e2m1", "ue8m0", "none", 1, 32),),
    "NVFP4": (Format("e2m1", "e4m3", "none", 1, 16),),
    "MXFP8": (Format("e4m3", "ue8m0", "none", 1, 32),),
}

# --- aliases -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Alias:
    """Another name of a backend.

    Attributes
    ----------
    name
        What the user types.
    backends
        What it stands for; the first one that is installed and can run here counts.
    meaning
        The weights that the name promises to take.
    format
        What they are stored as; None for the backend's default.
    """

    name: str
    backends: tuple[str, ...]
    meaning: str
    format: Format | None = None


# The method names of kt-kernel that are not the names of backends here.
_TABLE = (
    Alias(
        "FP8_PERCHANNEL",
        ("FP8",),
        "E4M3 with a scale per output row",
        Format("e4m3", "f32", "none", 1, 0),
    ),
    Alias(
        "MXFP8",
        ("FP8",),
        "E4M3 with power-of-two scales per 32 (MiniMax-M3)",
        Format("e4m3", "ue8m0", "none", 1, 32),
    ),
    Alias(
        "NVFP4",
        ("MXFP4",),
        "E2M1 with E4M3 scales per 16 and an f32 per matrix",
        Format("e2m1", "e4m3", "none", 1, 16),
    ),
    Alias(
        "GPTQ_INT4",
        ("AMXINT4",),
        "GPTQ checkpoints of 4 bits",
        Format("u4", "f16", "u8", 1, 128),
    ),
    Alias(
        "AWQ_INT4",
        ("AMXINT4",),
        "AWQ checkpoints of 4 bits",
        Format("u4", "f16", "u8", 1, 128),
    ),
    # kt-kernel computes it with libraries. AMXINT8 is never slower than those where it runs, and
    # five times as fast as a BLIS that has no int8 products.
    Alias("MOE_INT8", ("AMXINT8", "KML", "BLIS"), "int8 with a scale per output row"),
    Alias("MOE_INT4", ("AMXINT4",), "4 bits, quantised while loading"),
    Alias("INT8", ("AMXINT8", "KML"), "int8 with a scale per output row"),
    Alias("AMXBF16", ("BF16",), "bf16"),
    Alias("GGUF", ("LLAMAFILE",), "any of ggml's types, as GGUF files have them"),
    Alias("AMXFP8", ("FP8",), "E4M3 with scales per 128 x 128"),
)

ALIASES = {alias.name: alias for alias in _TABLE}


def find_alias(name: str, installed: Collection[str]) -> Alias | None:
    """Return what a name, in any case, is an alias of; None for that of an installed backend."""
    return None if name in installed else ALIASES.get(name.upper())
