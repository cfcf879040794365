"""SGLang's own code for compressed-tensors: it chooses a scheme, and loads weights."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import sglang_engine
import torch
from sglang_engine import ABSENT, LAYER, QUANTIZATION
from sglang_stage import load

_PACKAGE = f"{QUANTIZATION}.compressed_tensors"
# Of a layer: what its loader asks, and is for GPUs.
_OPTIONS = ("use_flashinfer_trtllm_moe", "use_padded_loading", "use_triton_kernels")


class _Files(importlib.abc.MetaPathFinder):
    """Finds the modules of the package as they are, and leaves all others to stand-ins."""

    def __init__(self, files: Path) -> None:
        self._files = files

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if not f"{name}.".startswith(f"{_PACKAGE}."):
            return None
        place = self._files.joinpath(*name.split("."))
        file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        return importlib.util.spec_from_file_location(name, file) if file.is_file() else None


def load_experts(
    patch: pytest.MonkeyPatch,
    files: Path,
    config: dict[str, Any],
    tensors: Mapping[str, torch.Tensor],
) -> Any:
    """Return layer 1 with its experts, loaded as SGLang's models do it.

    Parameters
    ----------
    patch, files
        What is patched, and the files of the release.
    config
        config.json of the checkpoint.
    tensors
        All of its tensors by name.
    """
    made = sglang_engine.engine(patch, files)
    patch.setattr(sys, "meta_path", [_Files(files), *sys.meta_path])
    for name in [*sys.modules]:
        if f"{name}.".startswith(f"{_PACKAGE}."):
            patch.delitem(sys.modules, name)
    load(patch, files, "sglang.srt.layers.moe.utils")
    around = sys.modules[LAYER.rpartition(".")[0]]
    for name in ("FusedMoE", "FusedMoeWeightScaleSupported"):
        patch.setattr(around, name, getattr(made.layer, name), raising=False)
    for name in ("info", "warning"):  # SGLang's own additions
        patch.setattr(logging.Logger, f"{name}_once", getattr(logging.Logger, name), raising=False)
    # Names of types, which schemes of linear layers look up for GPUs while they are imported.
    types = (sglang_engine.NOTHING, sglang_engine.NOTHING)
    utils = importlib.import_module(f"{QUANTIZATION}.utils")
    patch.setattr(utils, "get_scalar_types", lambda: types, raising=False)
    module = importlib.import_module(f"{_PACKAGE}.compressed_tensors")
    # torch.compile asks whether there is Triton, and would find the stand-in.
    for name in [*sys.modules]:
        if name.partition(".")[0] in ABSENT:
            del sys.modules[name]
    quantization = module.CompressedTensorsConfig.from_config(config["quantization_config"])
    stem = "model.layers.1.mlp."
    kind = made.layer.FusedMoE
    bare = kind.__new__(kind)
    method = quantization.get_quant_method(bare, f"{stem}experts")
    options = {
        "scheme": bare.scheme,
        "quant_config": quantization,
        **dict.fromkeys(_OPTIONS, False),
    }
    layer = sglang_engine.experts(made, method, config, **options)
    params = dict(layer.named_parameters())
    mapping = kind.make_expert_params_mapping(
        "gate_proj", "down_proj", "up_proj", config["num_experts"]
    )
    for name, tensor in tensors.items():
        for param_name, weight_name, expert, shard in mapping:
            if name.startswith(stem) and weight_name in name:
                place = name.removeprefix(stem).replace(weight_name, param_name)
                param = params[place.removeprefix("experts.")]
                param.weight_loader(param, tensor, place, shard_id=shard, expert_id=expert)
    return layer
