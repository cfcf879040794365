"""What the formats of ``ktk/abi.h`` mean: their values in float64, and their resolution."""

from __future__ import annotations

from ktk.testing.elements import (
    ELEMENTS,
    UE8M0_NAN,
    Float,
    Format,
    Integer,
    element_table,
    fill_bytes,
    group_counts,
    is_known,
    per_group,
)
from ktk.testing.resolution import (
    COARSE_BITS,
    check_codec,
    codec_bound,
    group_norm,
    has_resolution,
)
from ktk.testing.sources import (
    Source,
    Summary,
    as_float64,
    has_infinity,
    make_source,
    nan_places,
    with_infinity,
    with_nan,
    with_rows_apart,
)

__all__ = [
    "COARSE_BITS",
    "ELEMENTS",
    "UE8M0_NAN",
    "Float",
    "Format",
    "Integer",
    "Source",
    "Summary",
    "as_float64",
    "check_codec",
    "codec_bound",
    "element_table",
    "fill_bytes",
    "group_counts",
    "group_norm",
    "has_infinity",
    "has_resolution",
    "is_known",
    "make_source",
    "nan_places",
    "per_group",
    "with_infinity",
    "with_nan",
    "with_rows_apart",
]
