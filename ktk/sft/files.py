"""Reads and writes adapters of experts."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import torch

from ktk.lora import Lora
from ktk.sft import names
from ktk.sft.experts import packed_experts
from ktk.sft.names import AdapterError, State
from ktk.sft.peft_layers import join, take_off, was_read
from ktk.transformers import adapter

_CONFIG = "adapter_config.json"
_PEFT = "adapter_model.safetensors"
_KT = "fused_expert_lora.safetensors"
LAYOUTS = ("peft", "peft-fused", "kt")


def save_adapter(
    model: torch.nn.Module, path: str | os.PathLike[str], layout: str = "peft"
) -> None:
    """Write the adapters of a model's experts to a folder.

    Parameters
    ----------
    model : torch.nn.Module
    path : path
        A folder, which is made. Adapters of attention, which PEFT saves, go to another one.
    layout : str
        ``peft``: a tensor for each expert and matrix, as servers read them; ``peft-fused``: what
        PEFT itself loads into a model that transformers computes, by `target_parameters`, of twice
        the rank; ``kt``: ``fused_expert_lora.safetensors`` of kt-kernel.

    Raises
    ------
    ValueError
        The experts have no adapter, or the layout is none.
    """
    from safetensors.torch import save_file

    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    state: State = {}
    lora, where = None, ""
    for name, module, packed in packed_experts(model):
        mine = adapter.lora_of(module)
        if mine is None:
            continue
        lora = mine
        plain = _plain_name(name)
        where = re.split(r"layers\.\d+\.", plain)[-1]
        if layout == "kt":
            state |= names.to_kt(plain, mine)
        elif layout == "peft":
            state |= names.to_peft(plain, mine)
        else:
            state |= names.to_fused(plain, mine, packed.layout)
    if lora is None:
        raise ValueError("the experts of this model have no adapter: call ktk.sft.add_lora(model)")
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(state, folder / (_KT if layout == "kt" else _PEFT), metadata={"format": "pt"})
    (folder / _CONFIG).write_text(json.dumps(_config(model, lora, layout, where), indent=2) + "\n")


def load_adapter(
    model: torch.nn.Module, path: str | os.PathLike[str], *, dtype: torch.dtype | None = None
) -> None:
    """Put an adapter from a folder beside the packed experts of a model, instead of any before.

    Parameters
    ----------
    model : torch.nn.Module
    path : path
        A folder that :func:`save_adapter`, PEFT or kt-kernel wrote. Tensors that are not of
        experts, as PEFT's of attention, are left to PEFT.
    dtype : torch.dtype, optional
        Of the factors; by default that of the files.

    Raises
    ------
    FileNotFoundError
        The folder has no adapter.
    ValueError
        The adapter is for another model, or not an adapter of low rank that ktk computes.
    """
    folder = Path(path)
    state, scale_of = _read(folder)
    used = False
    for name, module, packed in packed_experts(model):
        plain = _plain_name(name)
        found = names.factors_of(plain, state, packed.moe.config, packed.layout)
        if not found:
            take_off(module)
            continue
        rank = found[next(iter(found))].shape[1 if next(iter(found)).endswith("a") else 2]
        made = {key: value.to(dtype or value.dtype).contiguous() for key, value in found.items()}
        # An adapter that was there goes on, as at a checkpoint, and begins where it did.
        read = adapter.lora_of(module) is None or was_read(module)
        adapter.put_lora(module, Lora(**made, scale=scale_of(rank)))
        join(model, [module], read=read)
        used = True
    if not used:
        listed = ", ".join(sorted(state)[:3])
        raise AdapterError(f"{folder} has no factors of this model's experts; it has {listed} ...")


def _plain_name(name: str) -> str:
    """Return a module's name in the model that PEFT has wrapped."""
    return name.removeprefix(names.PREFIX)


def _read(folder: Path) -> tuple[State, Any]:
    """Return all tensors of an adapter, and what a rank means as the scale."""
    from safetensors.torch import load_file

    state: State = {}
    for name in (_KT, _PEFT):
        if (folder / name).exists():
            state |= load_file(folder / name)
    if not state:
        raise FileNotFoundError(f"{folder} has neither {_PEFT} nor {_KT}")
    if not (folder / _CONFIG).exists():
        raise FileNotFoundError(f"{folder} has no {_CONFIG}, which says what alpha is")
    config = json.loads((folder / _CONFIG).read_text())
    if config.get("use_dora"):
        raise AdapterError(f"{folder / _CONFIG}: use_dora is set, which ktk does not compute")
    alpha = float(config["lora_alpha"])
    if config.get("use_rslora"):
        return state, lambda rank: alpha / rank**0.5
    return state, lambda rank: alpha / rank


def _config(model: torch.nn.Module, lora: Lora, layout: str, where: str) -> dict[str, Any]:
    fused = layout == "peft-fused"
    rank = lora.rank * (2 if fused else 1)
    parts = {name.split("_")[0] for name, _ in lora.factors()}
    found: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": getattr(getattr(model, "config", None), "name_or_path", None),
        "r": rank,
        "lora_alpha": lora.scale * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    if fused:
        tensors = ["gate_up_proj"] * bool(parts & {"gate", "up"})
        tensors += ["down_proj"] * ("down" in parts)
        found |= {"target_modules": [], "target_parameters": [f"{where}.{t}" for t in tensors]}
    else:
        found["target_modules"] = sorted(f"{part}_proj" for part in parts)
    return found
