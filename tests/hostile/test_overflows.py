"""The ways in which other readers of model files were broken into, each by a file that shows it.

Sizes that wrap around 64 bits or change their sign, lengths and shapes beyond the end of the file:
llama.cpp's CVE-2025-53630 and CVE-2026-27940 (sizes of tensors that wrap), CVE-2026-7482 of Ollama
(a shape larger than the file, read while it is quantised), CVE-2024-21802, -21825, -21836 and
-23496 (numbers of dimensions, tensors and entries, lengths of strings and arrays), CVE-2025-49847
(a length that is negative where it is signed), CVE-2024-41130 and -32878 (what a file leaves out).
"""

from __future__ import annotations

import json
import struct
import time
from pathlib import Path
from typing import Any

import pytest
import sound

from ktk.checkpoint import open_checkpoint
from ktk.errors import CheckpointError

GATE = b"blk.0.ffn_gate_exps.weight"
ENTRY = b"qwen3moe.expert_count"
U32, U64 = "<I", "<Q"


def patched(data: bytes, name: bytes, offset: int, *numbers: tuple[str, int]) -> bytes:
    """Write numbers so many bytes behind a name."""
    at = data.index(name) + len(name) + offset
    written = b"".join(struct.pack(how, number) for how, number in numbers)
    return data[:at] + written + data[at + len(written) :]


def read(path: Path) -> None:
    """Read everything there is."""
    with open_checkpoint(path) as checkpoint:
        for number in checkpoint.layers():
            layer = checkpoint.layer(number)
            for expert in range(layer.config.num_experts):
                layer.values(expert)


def refused(path: Path) -> str:
    """Return the sentence that reading ends with, at once."""
    began = time.process_time()
    with pytest.raises(CheckpointError) as caught:
        read(path)
    assert time.process_time() - began < 5
    assert "\n" not in str(caught.value)
    return str(caught.value)


#: What stands behind a tensor's name: the number of dimensions, each of them, type, offset.
TENSORS: dict[str, tuple[int, tuple[tuple[str, int], ...]]] = {
    "a size that wraps to nothing": (4, ((U64, 2**32), (U64, 2**32))),
    "a size that wraps to a little": (4, ((U64, 2**63 + 32), (U64, 2))),
    "a size that is negative": (4, ((U64, 2**64 - 32),)),
    "more experts than the file has": (20, ((U64, 2**40),)),
    "more rows than the file has": (12, ((U64, 2**40),)),
    "no rows": (12, ((U64, 0),)),
    "more dimensions than there are": (0, ((U32, 2**32 - 1),)),
    "no dimensions": (0, ((U32, 0),)),
    "an offset behind the end": (32, ((U64, 2**40),)),
    "an offset that wraps": (32, ((U64, 2**64 - 32),)),
}


@pytest.mark.parametrize("how", TENSORS)
def test_a_gguf_tensor_that_does_not_fit_is_refused(tmp_path: Path, how: str) -> None:
    path = sound.gguf(tmp_path / "model") / "m.gguf"
    offset, numbers = TENSORS[how]
    path.write_bytes(patched(path.read_bytes(), GATE, offset, *numbers))
    assert str(path) in refused(path)


#: What stands behind an entry's name: the type of its value, and that. 8 is a string, 9 an array.
ENTRIES: dict[str, tuple[tuple[str, int], ...]] = {
    "a string without end": ((U32, 8), (U64, 2**64 - 1)),
    "a string of negative length": ((U32, 8), (U64, 2**63)),
    "a string of 2^31 bytes": ((U32, 8), (U64, 2**31)),
    "an array whose size wraps": ((U32, 9), (U32, 12), (U64, 2**61 + 1)),
    "an array without end": ((U32, 9), (U32, 0), (U64, 2**64 - 1)),
    "strings without end": ((U32, 9), (U32, 8), (U64, 2**61)),
    "a string in an array of negative length": ((U32, 9), (U32, 8), (U64, 1), (U64, 2**63)),
    "arrays in an array": ((U32, 9), (U32, 9), (U64, 1)),
}


@pytest.mark.parametrize("how", ENTRIES)
def test_a_gguf_entry_that_does_not_fit_is_refused(tmp_path: Path, how: str) -> None:
    path = sound.gguf(tmp_path / "model") / "m.gguf"
    path.write_bytes(patched(path.read_bytes(), ENTRY, 0, *ENTRIES[how]))
    assert str(path) in refused(path)


@pytest.mark.parametrize("at", [8, 16])
@pytest.mark.parametrize("count", [2**64 - 1, 2**63, 2**61])
def test_numbers_of_tensors_and_entries_are_not_believed(
    tmp_path: Path, at: int, count: int
) -> None:
    path = sound.gguf(tmp_path / "model") / "m.gguf"
    data = path.read_bytes()
    path.write_bytes(data[:at] + struct.pack(U64, count) + data[at + 8 :])
    assert str(path) in refused(path)


#: A tensor's entry in the header of safetensors; [96, 64] of bf16 are 12288 bytes.
HEADERS: dict[str, dict[str, Any]] = {
    "a size that wraps": {"shape": [2**32, 2**32, 96, 64]},
    "a size that wraps to the right one": {"shape": [2**63 + 96, 64]},
    "a negative size": {"shape": [-96, -64]},
    "a shape larger than the file": {"shape": [2**40, 64]},
    "an end behind the file": {"data_offsets": [0, 2**63 - 1]},
    "an end before the beginning": {"data_offsets": [12288, 0]},
    "a negative beginning": {"data_offsets": [-12288, 0]},
    "nothing, in many columns": {"shape": [0, 2**62], "data_offsets": [0, 0]},
}


@pytest.mark.parametrize("how", HEADERS)
def test_a_safetensors_tensor_that_does_not_fit_is_refused(tmp_path: Path, how: str) -> None:
    folder = sound.safetensors(tmp_path / "model")
    path = folder / "model-1.safetensors"
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    first = next(one for one in header.values() if one.get("data_offsets", [1])[0] == 0)
    first |= HEADERS[how]
    written = json.dumps(header).encode()
    path.write_bytes(struct.pack(U64, len(written)) + written + data[end:])
    assert str(path) in refused(folder)


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("a", {"shape": [2**63 - 1] * 100_000}),
        ("a", {"shape": [1] * 17}),
        ("a" * 100_000, {"shape": [2**63 - 1] * 16}),
        ("a" * 100_000, {"shape": [[]]}),
        ("a" * 100_000, {"dtype": []}),
        ("a" * 100_000, {"data_offsets": [4, 0]}),
        ("a" * 100_000, {"data_offsets": [4, 8]}),
        ("\n" * 100_000, {}),
    ],
    ids=range(8),
)
def test_messages_on_headers_of_safetensors_are_short(
    tmp_path: Path, name: str, entry: dict[str, Any]
) -> None:
    """And come at once: the product of so many extents is a number of millions of digits."""
    path = sound.safetensors(tmp_path / "model") / "model-1.safetensors"
    header = {name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **entry}}
    written = json.dumps(header).encode()
    path.write_bytes(struct.pack(U64, len(written)) + written + bytes(8))
    message = refused(path.parent)
    assert str(path) in message
    assert len(message) < len(str(path)) + 1500


@pytest.mark.parametrize("length", [2**64 - 1, 2**63, 2**63 - 8, 100_000_001])
def test_the_length_of_a_safetensors_header_is_not_believed(tmp_path: Path, length: int) -> None:
    folder = sound.safetensors(tmp_path / "model")
    path = folder / "model-1.safetensors"
    path.write_bytes(struct.pack(U64, length) + path.read_bytes()[8:])
    assert str(path) in refused(folder)
