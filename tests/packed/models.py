"""A small model with all that is no expert, as hubs have it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import checkpoints as made
import torch
from safetensors.torch import load_file, save_file

# What a folder has beside weights; the last two are not copied.
OTHERS = ("generation_config.json", "tokenizer.json", "chat_templates/one.jinja")
LEFT = ("hf_quant_config.json", "model.bin")


def write(folder: Path, sizes: made.Sizes = (made.E, made.H, made.I), **config: Any) -> Path:
    """Write a model of two layers in two files: experts, attention, router, shared expert, head."""
    made.write(folder, layers=(0, 1), sizes=sizes)
    _, hidden, inner = sizes
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(5)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    for layer in (0, 1):
        stem = f"model.layers.{layer}"
        tensors[f"{stem}.self_attn.q_proj.weight"] = random(hidden, hidden)
        tensors[f"{stem}.mlp.gate.weight"] = random(sizes[0], hidden)
        tensors[f"{stem}.mlp.gate.e_score_correction_bias"] = random(sizes[0]).float()
        tensors[f"{stem}.mlp.shared_experts.up_proj.weight"] = random(inner, hidden)
    tensors["lm_head.weight"] = random(33, hidden)
    tensors["model.norm.weight"] = random(hidden)
    first = {name: one for name, one in tensors.items() if "layers.1" not in name}
    parts = {"one.safetensors": first, "two.safetensors": {**tensors}}
    for name in first:
        del parts["two.safetensors"][name]
    places: dict[str, str] = {}
    for file, part in parts.items():
        save_file(part, folder / file)
        places |= dict.fromkeys(part, file)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (folder / "config.json").write_text(json.dumps({**made.config(sizes), **config}))
    for name in (*OTHERS, *LEFT):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f"what is in {name}")
    return folder


def put(folder: Path, stem: str, made: Mapping[str, torch.Tensor]) -> Path:
    """Give a matrix of the first file other tensors, by what follows its name."""
    file = folder / "one.safetensors"
    rest = {name: one for name, one in load_file(file).items() if not name.startswith(f"{stem}.")}
    save_file(rest | {stem + suffix: one.contiguous() for suffix, one in made.items()}, file)
    index = folder / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    kept = {name: place for name, place in places.items() if not name.startswith(f"{stem}.")}
    kept |= dict.fromkeys((stem + suffix for suffix in made), file.name)
    index.write_text(json.dumps({"weight_map": kept}))
    return folder


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Read all tensors by safetensors' own reader, each from the file that the index names."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    files = {file: load_file(folder / file) for file in set(index.values())}
    assert sorted(index) == sorted(name for one in files.values() for name in one)
    return {name: files[file][name] for name, file in index.items()}


def contents(folder: Path) -> dict[str, bytes]:
    """All files of a folder and those in it, but hidden ones."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith(".")
    }
