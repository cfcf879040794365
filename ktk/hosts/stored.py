"""Which tensors a matrix has in a checkpoint, as its quantization_config says: for hosts that want
to know before the first tensor comes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ktk.checkpoint.entries import EntryError
from ktk.checkpoint.quantization import read_quantization

#: What else may come with a matrix, and says nothing that products need.
IGNORED = ("input_scale", "input_global_scale", "input_zero_point")
# What stands in the place of `method`, for those whose tensors have one set of names.
_METHODS = {
    "gptq": ("qweight", "scales", "qzeros"),
    "awq": ("qweight", "scales", "qzeros"),
    "mxfp4": ("blocks", "scales"),
    "gpt_oss_mxfp4": ("blocks", "scales"),
    "mxfp8": ("weight", "weight_scale_inv"),
}
# Whom the codes are of that ktk reads from files and has no hosts' tensors for, not all of them.
_NAMES = {
    "gptq": "GPTQ",
    "awq": "AWQ",
    "bitsandbytes": "bitsandbytes",
    "hqq": "HQQ",
    "compressed-tensors": "compressed-tensors",
    "modelopt": "ModelOpt",
    "torchao": "torchao",
}
# 4-bit floats of compressed-tensors, by what may be the columns of a group: MXFP4 and NVFP4.
_SMALL_FLOATS = {
    frozenset([32]): ("weight_packed", "weight_scale"),
    frozenset([16]): ("weight_packed", "weight_scale", "weight_global_scale"),
}


def roles_of(quantization: Mapping[str, Any] | None) -> tuple[str, ...] | None:
    """Return the roles of a matrix's tensors, as :class:`ktk.ExpertCollector` takes them.

    Parameters
    ----------
    quantization
        The quantization_config of config.json; None or empty where weights are floats.

    Returns
    -------
    tuple of str or None
        None: ktk reads no such matrices, or knows no such config.
    """
    if not quantization:
        return ("weight",)
    try:
        found = read_quantization({"quantization_config": quantization})
    except EntryError:
        return None
    if found.method == "fp8":
        blocks = quantization.get("weight_block_size")
        return ("weight", "weight_scale_inv" if blocks else "weight_scale")
    if found.method == "compressed-tensors":
        return _compressed_tensors(quantization, found.bits, found.is_float, found.symmetric)
    if found.method.startswith("modelopt"):
        algorithm = quantization.get("quant_algo")
        return ("weight", "weight_scale", "weight_scale_2") if algorithm == "NVFP4" else None
    if found.method in ("gptq", "awq") and found.bits != 4:
        return None
    roles = _METHODS.get(found.method)
    if found.method == "gptq" and quantization.get("desc_act"):
        return (*_METHODS["gptq"], "g_idx")
    return roles


def refused(quantization: Mapping[str, Any], host: str) -> str:
    """Name weights of a host that ktk does not compute, and what to do; empty if it has no idea.

    Parameters
    ----------
    quantization
        The quantization_config of config.json, of which :func:`roles_of` knows no tensors.
    host
        The name of the program that has them.
    """
    method = quantization.get("quant_method")
    name = _NAMES.get(method) if isinstance(method, str) else None
    if name is None:
        return ""
    try:
        bits = read_quantization({"quantization_config": quantization}).bits
    except EntryError:
        bits = None
    how = f"{name} in {bits} bits" if bits else name
    return (
        f"weights stored by {how} in {host}: ktk serve MODEL --engine transformers reads them from "
        "the model's files"
    )


def _compressed_tensors(
    quantization: Mapping[str, Any], bits: int | None, is_float: bool, symmetric: bool | None
) -> tuple[str, ...] | None:
    groups = quantization["config_groups"].values() if "config_groups" in quantization else ()
    weights = [group.get("weights") or {} for group in groups]
    if bits == 8:
        return ("weight", "weight_scale")
    if bits != 4:
        return None
    if is_float:
        return _SMALL_FLOATS.get(frozenset(_groups(weights)))
    zero = ("weight_zero_point",) if symmetric is False else ()
    sorts = any(one.get("actorder") in (True, "group") for one in weights)
    order = ("weight_g_idx",) if sorts else ()
    return ("weight_packed", "weight_scale", "weight_shape", *zero, *order)


def _groups(weights: list[Mapping[str, Any]]) -> set[Any]:
    return {one.get("group_size") for one in weights}
