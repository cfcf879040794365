"""What a packed file says about itself, as JSON in the metadata of safetensors.

    ktk        {"version": 1, "writer": "ktk 0.1.0", "backend": "AMXINT4", "layer": 3,
                "source": "...", "config": {...}, "formats": {"gate": {...}, ...},
                "biases": [...], "factors": [...], "xxh3": {"gate": "16 digits per expert", ...}}
    ktk_xxh3   the checksum of that text

Checksums are XXH3 of 64 bits, one for each tensor of each expert, because they must not slow down
loading. AMXINT8 on two cores of a Zen 4, from the page cache: 2.3 GB/s with the CRC-32 of zlib (4.2
GB/s on one thread; SHA-256 makes 1.7, BLAKE2b 0.9) where 3.9 went without; with XXH3, which makes
30, 3.3 where 3.5 went without. They are there to notice decay, not attackers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import version
from typing import Any

import xxhash

from ktk._core import Format
from ktk.checkpoint.config import ExpertConfig
from ktk.packed.layout import ALIGNMENT, Layout

VERSION = 1
_DIGITS = 16


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

    def same_content(self, other: Header) -> bool:
        """Whether two files are of one conversion, whatever their bytes are."""
        mine, theirs = (_entries(header) for header in (self, other))
        return all(mine[key] == theirs[key] for key in mine.keys() - {"xxh3", "writer"})


def checksum(data: bytes | memoryview) -> int:
    """Return the checksum of bytes; other threads run meanwhile."""
    digest: int = xxhash.xxh3_64_intdigest(data)
    return digest


def to_bytes(header: Header) -> bytes:
    """Write everything that stands before the tensors; as long for any checksums."""
    text = json.dumps(_entries(header), separators=(",", ":"))
    document: dict[str, Any] = {
        "__metadata__": {"format": "pt", "ktk": text, "ktk_xxh3": _hex(checksum(text.encode()))}
    }
    experts = header.layout.config.num_experts
    for name, spec in header.layout.specs.items():
        begin = header.layout.offsets[name]
        document[name] = {
            "dtype": spec.dtype,
            "shape": [experts, *spec.shape],
            "data_offsets": [begin, begin + spec.nbytes * experts],
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
    text = metadata["ktk"]
    if metadata.get("ktk_xxh3") != _hex(checksum(text.encode())):
        raise HeaderDamage("is damaged: the checksum of its header is wrong")
    entries = json.loads(text)
    if entries["version"] != VERSION:
        raise HeaderError(
            f"has version {entries['version']} of ktk's packed files, and this ktk reads version "
            f"{VERSION}: it was written by {entries['writer']}"
        )
    formats = {part: Format(**fmt) for part, fmt in entries["formats"].items()}
    config = ExpertConfig(**entries["config"])
    return Header(
        backend=entries["backend"],
        layer=entries["layer"],
        source=entries["source"],
        layout=Layout(config, formats, tuple(entries["biases"]), tuple(entries["factors"])),
        checksums={name: _split(digits) for name, digits in entries["xxh3"].items()},
    )


def _entries(header: Header) -> dict[str, Any]:
    layout = header.layout
    config = asdict(layout.config)
    # How the source was quantised says nothing about this file.
    del config["quantization"]
    none = (0,) * layout.config.num_experts
    return {
        "version": VERSION,
        "writer": _writer(),
        "backend": header.backend,
        "layer": header.layer,
        "source": header.source,
        "config": config,
        "formats": {part: format_entries(fmt) for part, fmt in layout.formats.items()},
        "biases": list(layout.biases),
        "factors": list(layout.factors),
        "xxh3": {
            name: "".join(map(_hex, header.checksums.get(name, none))) for name in layout.specs
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
def _writer() -> str:
    return f"ktk {version('ktk')}"


def _hex(digest: int) -> str:
    return f"{digest:0{_DIGITS}x}"


def _split(digits: str) -> tuple[int, ...]:
    return tuple(int(digits[i : i + _DIGITS], 16) for i in range(0, len(digits), _DIGITS))
