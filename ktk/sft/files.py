"""Reads and writes adapters of experts."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import torch

from ktk.durable import naming, replaced
from ktk.lora import Lora
from ktk.sft import names
from ktk.sft.arguments import checked_dtype
from ktk.sft.experts import packed_experts
from ktk.sft.folders import (
    CONFIG,
    KT,
    PARAMETERS,
    PEFT,
    PREFIX,
    AdapterError,
    Written,
    check_free,
)
from ktk.sft.names import State
from ktk.sft.pairs import alike, as_lora
from ktk.sft.peft_layers import join, take_off, was_read
from ktk.sft.sharded import check_fits, gathered, is_sharded, leave_parts, written_once
from ktk.transformers import adapter
from ktk.transformers.layout import Layout

LAYOUTS = ("peft", "peft-fused", "kt", "parameters")
_FILES = {"kt": KT, "parameters": PARAMETERS}


def save_adapter(
    model: torch.nn.Module, path: str | os.PathLike[str], layout: str = "peft"
) -> None:
    """Write the adapters of a model's experts to a folder.

    Where :func:`torch.distributed.fsdp.fully_shard` has divided the factors among ranks, all ranks
    call this, and the first one writes.

    Parameters
    ----------
    model : torch.nn.Module
    path : path
        A folder, which is made. Adapters of attention, which PEFT saves, go to another one.
    layout : str
        ``peft``: a tensor for each expert and matrix, as servers read them; ``peft-fused``: what
        PEFT itself loads into a model that transformers computes, by `target_parameters`, of twice
        the rank where experts have gates; ``kt``: ``fused_expert_lora.safetensors`` of kt-kernel;
        ``parameters``: what a training goes on with, since ranks and scales that differ between
        modules stay as they are, where others are filled up to one rank.

    Raises
    ------
    OSError
        A file cannot be written, as on a full disk; it is named, and what was there stays.
    ValueError
        The experts have no adapter, or the layout is none, or cannot tell two modules apart; or the
        folder has an adapter of other layers, which this would replace.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    found = []
    leave_parts(model)
    modules = packed_experts(model)
    sharded = is_sharded([module for _, module, _ in modules])
    for name, module, packed in modules:
        mine = adapter.lora_of(module)
        if mine is not None:
            found.append((_plain_name(name), packed, gathered(mine) if sharded else mine))
    if not found:
        raise ValueError("the experts of this model have no adapter: call ktk.sft.add_lora(model)")
    state: State = {}
    loras = [mine for _, _, mine in found]
    if layout != "parameters":
        # Files say one alpha and one rank; what was read from PEFT may have several.
        loras = alike(loras)
    for (plain, packed, _), mine in zip(found, loras, strict=True):
        if layout == "kt":
            named = names.to_kt(plain, mine)
        elif layout == "peft":
            named = names.to_peft(plain, mine)
        elif layout == "parameters":
            named = names.to_parameters(plain, mine)
        else:
            named = names.to_fused(plain, mine, packed.layout, packed.moe.config.zero_expert_num)
        if not named.keys().isdisjoint(state):
            raise AdapterError(
                f"layer {names.layer_of(plain)} has experts in two modules, which kt-kernel's "
                'layout does not tell apart: use layout="peft" or "parameters"'
            )
        state |= named
    where = list(dict.fromkeys(re.split(r"layers\.\d+\.", plain)[-1] for plain, _, _ in found))
    config = _config(model, loras[0], found[0][1].layout if layout == "peft-fused" else None, where)
    folder = Path(path)
    with written_once(sharded) as here:
        if not here:
            return
        check_free(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = folder / _FILES.get(layout, PEFT)
        with replaced(folder / CONFIG) as says, replaced(tensors) as has:
            try:
                with naming(tensors):
                    save_file(state, has, metadata={"format": "pt"})
            except SafetensorError as error:
                raise OSError(f"{tensors} cannot be written: {error}") from error
            with naming(folder / CONFIG):
                says.write_text(json.dumps(config, indent=2) + "\n")
            # An interruption from here on leaves no tensors beside the config of others.
            (folder / CONFIG).unlink(missing_ok=True)


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
        The adapter is for another model, damaged, or not one of low rank that ktk computes; or
        `fully_shard` has divided factors that it does not fit. The model is as it was.
    """
    dtype = None if dtype is None else checked_dtype(dtype)
    leave_parts(model)
    folder = Path(path)
    written = Written(folder)
    # All is read before anything is put, so that an adapter that cannot be leaves the model alone.
    made: list[tuple[Any, Lora | None]] = []
    for name, module, packed in packed_experts(model):
        parts = names.pairs_of(_plain_name(name), written, packed.moe.config, packed.layout)
        made.append((module, as_lora(parts, dtype) if parts else None))
        check_fits(name, module, made[-1][1])
    if not any(lora for _, lora in made):
        listed = ", ".join(sorted(written)[:3])
        raise AdapterError(f"{folder} has no factors of this model's experts; it has {listed} ...")
    written.check_all_taken()
    for module, lora in made:
        if lora is None:
            take_off(module)
            continue
        # An adapter that was there goes on, as at a checkpoint, and begins where it did.
        read = adapter.lora_of(module) is None or was_read(module)
        adapter.put_lora(module, lora)
        join(model, [module], read=read)


def _plain_name(name: str) -> str:
    """Return a module's name in the model that PEFT, `torch.compile` and DDP have wrapped."""
    words = [word for word in name.split(".") if word != "_orig_mod"]
    plain = ".".join(words).removeprefix("module.").removeprefix(PREFIX)
    return re.sub(r"\.modules_to_save\.[^.]+", "", plain)


def _config(
    model: torch.nn.Module, lora: Lora, fused: Layout | None, where: list[str]
) -> dict[str, Any]:
    """Return what PEFT reads beside the tensors; `fused`: of a module whose tensors have them."""
    rank = names.fused_rank(lora, fused) if fused else lora.rank
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
        first, down = fused.weights
        tensors = [first] * bool(parts & {"gate", "up"}) + [down] * ("down" in parts)
        found |= {
            "target_modules": [],
            "target_parameters": [f"{at}.{t}" for at in where for t in tensors],
        }
    else:
        found["target_modules"] = sorted(f"{part}_proj" for part in parts)
    return found
