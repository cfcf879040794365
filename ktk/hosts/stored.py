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
# What compressed-tensors calls integers that share words, and those in a byte each.
_IN_WORDS = frozenset(["pack-quantized"])
_IN_BYTES = frozenset(["int-quantized", "naive-quantized", "float-quantized"])
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
        None: ktk reads no such matrices, knows no such config, or would miss what vLLM drops.
    """
    if not quantization:
        return ("weight",)
    try:
        found = read_quantization({"quantization_config": quantization})
    except EntryError:
        return None
    if _sorting(quantization):
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
    return _METHODS.get(found.method)


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
        sorting = _sorting(quantization)
    except EntryError:
        bits, sorting = None, ""
    how = f"{name} in {bits} bits" if bits else name
    how += f" with sorted columns ({sorting})" if sorting else ""
    return (
        f"weights stored by {how} in {host}: ktk serve MODEL --engine transformers reads them from "
        "the model's files"
    )


def _compressed_tensors(
    quantization: Mapping[str, Any], bits: int | None, is_float: bool, symmetric: bool | None
) -> tuple[str, ...] | None:
    if bits not in (4, 8):
        return None
    groups = _groups(quantization)
    if is_float and bits == 4:
        sizes: set[Any] = {_weights(group).get("group_size") for group in groups}
        return _SMALL_FLOATS.get(frozenset(sizes))
    if is_float:
        return ("weight", "weight_scale")
    zero = ("weight_zero_point",) if symmetric is False else ()
    usual = "pack-quantized" if bits == 4 else "int-quantized"
    formats = {group.get("format") or quantization.get("format") or usual for group in groups}
    if formats <= _IN_WORDS:
        return ("weight_packed", "weight_scale", "weight_shape", *zero)
    if formats <= _IN_BYTES:
        return ("weight", "weight_scale", *zero)
    return None


def _sorting(quantization: Mapping[str, Any]) -> str:
    """Return the option by which the columns of a group are no neighbours; empty if they are.

    vLLM 0.32 refuses such models, and drops the tensors that say which group a column is of.
    """
    method = quantization.get("quant_method")
    if method == "gptq":
        # A group of all columns has the same ones in any order.
        sorts = quantization.get("desc_act") and quantization.get("group_size") != -1
        return "desc_act" if sorts else ""
    if method == "compressed-tensors":
        orders = [_weights(group).get("actorder") for group in _groups(quantization)]
        # "weight" and "static" sort while a model is quantised, and put the columns back.
        return "actorder" if any(one in (True, "group", "dynamic") for one in orders) else ""
    return ""


def _groups(quantization: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return what compressed-tensors says of each group of modules."""
    return list(quantization.get("config_groups", {}).values()) or [{}]


def _weights(group: Mapping[str, Any]) -> Mapping[str, Any]:
    return group.get("weights") or {}
