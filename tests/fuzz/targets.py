"""What is fuzzed in Python: readers of files, each called with bytes that may be anything.

A target writes what it is given as (a part of) a small checkpoint, and reads that. A refusal is a
`CheckpointError`; any other exception, and anything that takes long or much memory, is a fault.
Inputs of most targets are JSON, so that a mutator can change what they mean; what is no JSON is
taken as the bytes of the file.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf_files
import mutants
import numpy as np
import schemes
import sound
import torch

from ktk.checkpoint import open_checkpoint
from ktk.checkpoint.config import read_config
from ktk.checkpoint.entries import EntryError
from ktk.checkpoint.gguf.header import open_file
from ktk.checkpoint.packed import header as packed_header
from ktk.checkpoint.packed.folder import read_index
from ktk.checkpoint.reader import CheckpointReader
from ktk.checkpoint.safetensors.index import TensorIndex
from ktk.checkpoint.safetensors.tensor_file import TensorFile
from ktk.conversion import convert
from ktk.errors import CheckpointError

CORPUS = Path(__file__).parent / "corpus"
# Memory of tests is faster than a disk.
_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Target:
    """A reader, inputs that it takes, and how a program changes those."""

    read: Callable[[bytes], object]
    seeds: tuple[bytes, ...]
    mutate: Callable[[bytes, random.Random], bytes] = mutants.json_file

    def run(self, data: bytes) -> bool:
        """Read an input; returns whether that went well. Raises what is a fault."""
        try:
            self.read(data)
        except (CheckpointError, EntryError) as error:
            if "\n" in str(error):
                raise AssertionError(f"no sentence: {error}") from error
            return False
        return True


def folder() -> Path:
    """Make a folder that lives as long as the process."""
    _folders.append(tempfile.TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None))
    return Path(_folders[-1].name)


_folders: list[tempfile.TemporaryDirectory[str]] = []


def split(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the header of a safetensors file, and what is behind it."""
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def join(header: bytes, rest: bytes) -> bytes:
    """Make a safetensors file."""
    return len(header).to_bytes(8, "little") + header + rest


def dumps(document: Any) -> bytes:
    """Write JSON as short as it gets."""
    return json.dumps(document, separators=(",", ":")).encode()


def loads(data: bytes) -> Any:
    """Read JSON; None where it is none."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def read_all(checkpoint: CheckpointReader) -> None:
    """Read the last expert of the first layers, as stored and as floats."""
    for number in checkpoint.layers()[:2]:
        layer = checkpoint.layer(number)
        last = layer.config.num_experts - 1
        layer.expert(last)
        layer.values(last)
        layer.check_expert(last)
        for piece in layer.pieces(last):
            assert piece is not None


def safetensors() -> Target:
    """Read headers: a JSON object is one, and anything else a whole file."""
    made = sound.fp8(folder() / "model")
    path = made / "model-1.safetensors"
    header, rest = split(path.read_bytes())
    small = {"x": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, "__metadata__": {}}

    def read(data: bytes) -> None:
        path.write_bytes(join(data, rest) if data[:1] == b"{" else data)
        file = TensorFile(path)
        for name in file.tensors:
            file.stand_in(name)
            file.read(name)

    return Target(read, (dumps(header), join(dumps(small), bytes(24))))


def config() -> Target:
    """Read config.json: sizes, activation, quantisation, of layers and without."""
    made = folder()
    layers = {**sound.CONFIG, "num_hidden_layers": 4, "swiglu_limits": [0, 7.0, None, 0]}
    nested = {"text_config": sound.CONFIG, "model_type": "any", "swiglu_limit": 7.0}
    schemed = [scheme for _, _, scheme in schemes.SCHEMES.values()] + [schemes.AWQ_CONFIG]
    entries = [
        *({**sound.CONFIG, "quantization_config": scheme} for scheme in schemed),
        {**sound.CONFIG, "mlp_gate_softcap": 3, "mlp_up_softcap": 5.0, "num_experts": [3, 3]},
        layers,
        nested,
    ]

    def read(data: bytes) -> None:
        (made / "config.json").write_bytes(data)
        found = read_config(made)
        for number in (0, 3, 10**6):
            found.of_layer(number).layer()

    return Target(read, tuple(map(dumps, entries)))


def index() -> Target:
    """Read the list of which file holds which tensor."""
    made = sound.safetensors(folder() / "model")
    path = made / "model.safetensors.index.json"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        with TensorIndex(made) as found:
            for name in found.names():
                found.shape(name), found.dtype(name), found.nbytes(name), found.where(name)

    return Target(read, (path.read_bytes(),))


def quantized() -> Target:
    """Read experts of compressed-tensors, GPTQ, AWQ, FP8 and so on: their headers and config."""
    made = folder()
    payloads: list[bytes] = []
    seeds = []
    awq = (schemes.U4_ZERO, schemes.awq, schemes.AWQ_CONFIG)
    for fmt, writer, scheme in (*schemes.SCHEMES.values(), awq):
        schemes.write(made, schemes.tensors_of(schemes.sources(fmt, 1), writer), scheme)
        header, rest = split((made / "model.safetensors").read_bytes())
        entries = json.loads((made / "config.json").read_bytes())
        seeds.append(dumps({"of": len(payloads), "config": entries, "header": header}))
        payloads.append(rest)

    def read(data: bytes) -> None:
        document = loads(data)
        if not isinstance(document, dict) or not isinstance(document.get("of"), int):
            return
        rest = payloads[document["of"] % len(payloads)]
        (made / "config.json").write_bytes(dumps(document.get("config")))
        (made / "model.safetensors").write_bytes(join(dumps(document.get("header")), rest))
        with open_checkpoint(made) as checkpoint:
            read_all(checkpoint)

    return Target(read, tuple(seeds))


def packed() -> Target:
    """Read packed files: the list of layers, and a header whose checksum is right."""
    makes = [sound.packed(folder() / "model"), bf16z(folder() / "model")]
    wholes: list[bytes] = []
    seeds: list[bytes] = []
    for made in makes:
        header, rest = split((made / "layer-00000.safetensors").read_bytes())
        wholes.append(rest)
        entries = json.loads(header["__metadata__"]["ktk"])
        listed = json.loads((made / "ktk_packed.json").read_bytes())
        del header["__metadata__"]
        seeds.append(
            dumps({"of": len(seeds), "list": listed, "entries": entries, "tensors": header})
        )

    def read(data: bytes) -> None:
        document = loads(data)
        if not isinstance(document, dict) or not isinstance(document.get("of"), int):
            return
        number = document["of"] % len(makes)
        made, rest = makes[number], wholes[number]
        entries, tensors = dumps(document.get("entries")), document.get("tensors")
        digest = packed_header.hex_of(packed_header.checksum(entries))
        metadata = {"format": "pt", "ktk": entries.decode(), "ktk_xxh3": digest}
        header = {"__metadata__": metadata, **(tensors if isinstance(tensors, dict) else {})}
        (made / "layer-00000.safetensors").write_bytes(join(dumps(header), rest))
        (made / "ktk_packed.json").write_bytes(dumps(document.get("list")))
        read_index(made)
        with open_checkpoint(made) as checkpoint:
            read_all(checkpoint)

    return Target(read, tuple(seeds))


def bf16z(made: Path) -> Path:
    """Convert to a backend whose packed bytes are in the file."""
    source = sound.safetensors(made.parent / "source")
    convert(source, made, backend="BF16Z")
    return made


def gguf() -> Target:
    """Read GGUF: a header, with zeros behind it where the weights are, if it says so."""
    made = folder()
    path = made / "model.gguf"
    seeds = []
    for kind, bias in (("Q4_0", True), ("Q8_0", False), ("F16", False)):
        parts = {
            part: gguf_files.tensor((2, *shape), kind, 1)
            for part, shape in {"gate": (64, 32), "up": (64, 32), "down": (32, 64)}.items()
        }
        if bias:
            parts["gate_bias"] = gguf_files.tensor((2, 64), "F32", 2)
        fields = dict(zip(gguf_files.FIELDS, (2, 1, 32, 64), strict=True))
        gguf_files.write(path, gguf_files.stacked(parts), fields=fields)
        begin = min(one.begin for one in open_file(path).tensors.values())
        seeds.append(path.read_bytes()[:begin])
    weights = np.zeros(1 << 16, np.uint8).tobytes()

    def read(data: bytes) -> None:
        path.write_bytes(data + weights)
        with open_checkpoint(path) as checkpoint:
            read_all(checkpoint)

    def mutate(data: bytes, rng: random.Random) -> bytes:
        return mutants.gguf_number(data, rng) if rng.random() < 0.5 else mutants.damaged(data, rng)

    return Target(read, tuple(seeds), mutate)


#: Makes a target, by its name.
TARGETS: dict[str, Callable[[], Target]] = {
    "safetensors": safetensors,
    "config": config,
    "index": index,
    "quantized": quantized,
    "packed": packed,
    "gguf": gguf,
}


def inputs(name: str, target: Target) -> list[bytes]:
    """Return what a target is known to take, and what it once failed on."""
    kept = sorted(CORPUS.glob(f"{name}/*"))
    return [*target.seeds, *(path.read_bytes() for path in kept)]


def mutated(target: Target, data: bytes, rng: random.Random) -> bytes:
    """Change an input: what it means where it is JSON, and its bytes now and then."""
    is_json = target.mutate is mutants.json_file
    if rng.random() < 0.2 or (is_json and not isinstance(loads(data), dict)):
        return mutants.damaged(data, rng)
    try:
        return target.mutate(data, rng)
    except (RecursionError, ValueError, IndexError):  # too deep, too large, or empty
        return mutants.damaged(data, rng)


torch.set_num_threads(1)
