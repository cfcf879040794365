"""What a packed file says about itself, as JSON in the metadata of safetensors.

    ktk        {"version": 1, "writer": "ktk 0.1.0", "backend": "AMXINT4", "layer": 3,
                "source": "...", "read": "16 digits", "config": {...},
                "formats": {"gate": {...}, ...},
                "biases": [...], "factors": [...], "orders": [...],
                "packed": {"gate": "a layout", ...}, "sizes": {"gate": [bytes per expert], ...},
                "xxh3": {"gate": "16 digits per expert", ...}}
    ktk_xxh3   the checksum of that text

Checksums are XXH3 of 64 bits, one for each tensor of each expert, because they must not slow down
loading. AMXINT8 on two cores of a Zen 4, from the page cache: 2.3 GB/s with the CRC-32 of zlib (4.2
GB/s on one thread; SHA-256 makes 1.7, BLAKE2b 0.9) where 3.9 went without; with XXH3, which makes
30, 3.3 where 3.5 went without. They are there to notice decay, not attackers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from functools import cache
from importlib.metadata import version
from typing import Any

import xxhash

from ktk._core import Format
from ktk.checkpoint.config import ExpertConfig
from ktk.checkpoint.entries import EntryError, integer, integers, items, parse_object, table, text
from ktk.checkpoint.packed.layout import ALIGNMENT, Layout, PackedSpec
from ktk.config import PARTS, MoEConfig

VERSION = 1
# Of files that have columns in an order, which readers of the first version would not restore.
_ORDERED = 2
# Files are named by layers of five digits.
LAST_LAYER = 99_999
_MOST_BYTES = 1 << 48
_DIGITS = 16
_HEX = re.compile("[0-9a-f]*")


class HeaderError(ValueError):
    """A header is not what this version of ktk reads; the message ends a sentence about a file."""


class HeaderDamage(HeaderError):
    """A header is not as it was written."""


@dataclass(frozen=True)
class Header:
    """What a packed file holds.

    Attributes
    ----------
    backend
        Name of the backend it was made for.
    layer
        Number of the layer in the model.
    source
        Fingerprint of the checkpoint it was made from.
    read
        Checksum of what was read of that for this layer; None where the writer kept none.
    layout
        Its tensors.
    checksums
        Of each expert's part of each tensor.
    """

    backend: str
    layer: int
    source: str
    layout: Layout
    checksums: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    read: int | None = None

    def same_content(self, other: Header) -> bool:
        """Whether two files are of one conversion, whatever their bytes are."""
        mine, theirs = (_entries(header) for header in (self, other))
        of_bytes = {"xxh3", "sizes", "read", "writer"}
        return all(
            mine.get(key) == theirs.get(key) for key in (mine.keys() | theirs.keys()) - of_bytes
        )


def checksum(data: bytes | memoryview) -> int:
    """Return the checksum of bytes; other threads run meanwhile."""
    digest: int = xxhash.xxh3_64_intdigest(data)
    return digest


def to_bytes(header: Header) -> bytes:
    """Write everything that stands before the tensors; as long for any checksums."""
    mine = json.dumps(_entries(header), separators=(",", ":"))
    document: dict[str, Any] = {
        "__metadata__": {"format": "pt", "ktk": mine, "ktk_xxh3": hex_of(checksum(mine.encode()))}
    }
    experts = header.layout.config.num_experts
    for name, spec in header.layout.specs.items():
        begin = header.layout.offsets[name]
        document[name] = {
            "dtype": spec.dtype,
            "shape": list(spec.all_shape(experts)),
            "data_offsets": [begin, begin + sum(spec.place(experts - 1))],
        }
    body = json.dumps(document, separators=(",", ":")).encode()
    body += b" " * (-(8 + len(body)) % ALIGNMENT)
    return len(body).to_bytes(8, "little") + body


def from_metadata(metadata: Mapping[str, str] | None) -> Header:
    """Read the metadata of a safetensors file.

    Raises
    ------
    HeaderError
        It is no packed file of ktk, or of another version.
    HeaderDamage
        Its checksum is wrong.
    """
    if metadata is None or "ktk" not in metadata:
        raise HeaderError("is no packed file of ktk: its metadata lacks the entry ktk")
    written = metadata["ktk"].encode()
    if metadata.get("ktk_xxh3") != hex_of(checksum(written)):
        raise HeaderDamage("is damaged: the checksum of its header is wrong")
    try:
        return _read(parse_object(written))
    except EntryError as error:
        raise HeaderDamage(f"is damaged: in its header, {error}") from error


def _read(entries: Mapping[str, Any]) -> Header:
    found = integer("version", entries.get("version"))
    if found not in (VERSION, _ORDERED):
        raise HeaderError(
            f"has version {found} of ktk's packed files, and this ktk reads versions up to "
            f"{_ORDERED}: it was written by {text('writer', entries.get('writer'))}"
        )
    formats = table("formats", entries.get("formats"))
    config = _config(table("config", entries.get("config")))
    layout = Layout(
        config,
        {part: read_format(part, table(part, formats.get(part))) for part in config.parts},
        _parts("biases", entries.get("biases")),
        _parts("factors", entries.get("factors")),
        _packed(entries, config.num_experts),
        _parts("orders", entries.get("orders", [])),
    )
    checksums = table("xxh3", entries.get("xxh3"))
    experts = layout.config.num_experts
    return Header(
        backend=text("backend", entries.get("backend")),
        layer=integer("layer", entries.get("layer"), most=LAST_LAYER),
        source=text("source", entries.get("source")),
        read=_checksums("read", entries["read"], 1)[0] if "read" in entries else None,
        layout=layout,
        checksums={name: _checksums(name, checksums.get(name), experts) for name in layout.specs},
    )


def _config(entries: Mapping[str, Any]) -> ExpertConfig:
    optional: dict[str, Any] = {
        name: integer(name, entries[name])
        for name in ("num_layers", "model_hidden_size")
        if entries.get(name) is not None
    }
    # A field that the writer did not know yet has its default. The class checks what it gets.
    of_layer: dict[str, Any] = {
        one.name: entries.get(one.name)
        for one in fields(MoEConfig)
        if one.name in entries or one.default is MISSING
    }
    return ExpertConfig(
        model_type=text("model_type", entries.get("model_type")),
        **optional,
        **{**of_layer, "activation": text("activation", entries.get("activation"))},
    )


def read_format(part: str, entries: Mapping[str, Any]) -> Format:
    element, scale, zero = (
        text(f"{name} of {part}", entries.get(name)) for name in ("element", "scale", "zero")
    )
    rows, columns = (
        integer(f"{name} of {part}", entries.get(name)) for name in ("group_n", "group_k")
    )
    try:
        fmt = Format(element, scale, zero, rows, columns)
        shared, _ = fmt.block
    except ValueError as error:
        raise EntryError(f"the format of {part} is unknown: {error}") from error
    if not shared:
        raise EntryError(f"the format of {part} is unknown: {fmt}")
    return fmt


def _parts(name: str, value: Any) -> tuple[str, ...]:
    found = items(name, value)
    if not set(map(str, found)) <= set(PARTS):
        raise EntryError(f"{name} is {found}, expected some of {', '.join(PARTS)}")
    return tuple(found)


def _packed(entries: Mapping[str, Any], experts: int) -> dict[str, PackedSpec]:
    layouts, sizes = (table(name, entries.get(name, {})) for name in ("packed", "sizes"))
    return {
        part: PackedSpec(
            text(f"the layout of {part}", layouts[part]),
            integers(f"sizes of {part}", sizes.get(part), experts, most=_MOST_BYTES),
        )
        for part in _parts("packed", list(layouts))
    }


def _checksums(name: str, value: Any, experts: int) -> tuple[int, ...]:
    digits = text(f"xxh3 of {name}", value)
    if len(digits) != _DIGITS * experts or not _HEX.fullmatch(digits):
        raise EntryError(f"xxh3 of {name} is no {experts} checksums")
    return tuple(int(digits[i : i + _DIGITS], 16) for i in range(0, len(digits), _DIGITS))


def _entries(header: Header) -> dict[str, Any]:
    layout = header.layout
    config = asdict(layout.config)
    # How the source was quantised, and other layers, say nothing about this file.
    del config["quantization"], config["limits"]
    # Files that were written before there was such an entry are of the same conversion.
    if config["model_hidden_size"] is None:
        del config["model_hidden_size"]
    none = (0,) * layout.config.num_experts
    packed = {
        "packed": {part: spec.layout for part, spec in layout.packed.items()},
        "sizes": {part: spec.sizes for part, spec in layout.packed.items()},
    }
    return {
        "version": _ORDERED if layout.orders else VERSION,
        "writer": writer(),
        "backend": header.backend,
        "layer": header.layer,
        "source": header.source,
        "read": hex_of(header.read or 0),
        "config": config,
        "formats": {part: format_entries(fmt) for part, fmt in layout.formats.items()},
        "biases": list(layout.biases),
        "factors": list(layout.factors),
        **({"orders": list(layout.orders)} if layout.orders else {}),
        **(packed if layout.packed else {}),
        "xxh3": {
            name: "".join(map(hex_of, header.checksums.get(name, none))) for name in layout.specs
        },
    }


def format_entries(fmt: Format) -> dict[str, Any]:
    """Return the arguments that make a format."""
    return {
        "element": fmt.element,
        "scale": fmt.scale,
        "zero": fmt.zero,
        "group_n": fmt.group_n,
        "group_k": fmt.group_k,
    }


@cache
def writer() -> str:
    return f"ktk {version('ktk')}"


def hex_of(digest: int) -> str:
    return f"{digest:0{_DIGITS}x}"
