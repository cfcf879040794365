"""What config.json says about how weights are quantised, in the words of its many writers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ktk.checkpoint.entries import integer, integers, table, text

# Others (marlin, bitblas, gptq_p ...) may have tensors of the same names and shapes.
_PACKINGS = ("", "gptq", "gptq_v2", "gemm", "gemv", "gemv_fast", "exllama", "exllamav2", "ipex")


@dataclass(frozen=True)
class Quantization:
    """The `quantization_config` of a model; which of its tensors it applies to, they show.

    Attributes
    ----------
    method
        Who wrote it: fp8, compressed-tensors, gptq, awq, mxfp4 ...
    bits
        Of an integer weight; None where it is not said.
    mixed
        Whether groups of modules are said to have weights of several widths.
    is_float
        Whether weights are said to be floats, of any width.
    group_size
        Columns that share a scale; 0 for whole rows, None where it is not said.
    symmetric
        Whether zero points are the middle of the codes; None where it is not said.
    block
        Rows and columns that share a scale, of schemes by blocks.
    zero_offset
        What to add to zero points: GPTQ's first format stores them minus one.
    packing
        What GPTQ and AWQ call the layout of their tensors; empty where they do not say.
    """

    method: str = ""
    bits: int | None = None
    mixed: bool = False
    is_float: bool = False
    group_size: int | None = None
    symmetric: bool | None = None
    block: tuple[int, int] = (128, 128)
    zero_offset: int = 1
    packing: str = ""

    @property
    def refusal(self) -> str:
        """Why codes cannot be read, though their tensors look as if; ends a sentence. Or empty."""
        if self.packing in _PACKINGS:
            return ""
        return (
            f"is packed as {self.packing}, as config.json says, which ktk does not read: take a "
            f"checkpoint that is packed as gptq or gemm, or the one that it was made from"
        )


def read_quantization(entries: Mapping[str, Any]) -> Quantization:
    """Read the entry of config.json; what it does not say keeps the default."""
    entry = entries.get("quantization_config") or entries.get("compression_config")
    if not entry:
        return Quantization()
    found = table("quantization_config", entry)
    method = text("quant_method", found.get("quant_method") or "")
    groups = _groups(found) if "config_groups" in found else [found]
    weights = _agreed(groups)
    block = weights.get("weight_block_size") or weights.get("block_structure")
    if dynamic := found.get("dynamic"):
        of_some = _said_by(dynamic)
        weights = {name: weights[name] for name in weights if name not in of_some}
    bits = weights.get("bits", weights.get("num_bits"))
    rows, columns = integers("weight_block_size", block, 2, least=1) if block else (128, 128)
    packing = _packing(method, found)
    return Quantization(
        method=method,
        bits=None if bits is None else integer("bits", bits, least=1, most=64),
        mixed=any(one.get("num_bits") != groups[0].get("num_bits") for one in groups),
        is_float=weights.get("type") == "float",
        group_size=_group_size(weights),
        symmetric=_symmetric(weights),
        block=(rows, columns),
        zero_offset=0 if packing == "gptq_v2" else 1,
        packing=packing,
    )


def _said_by(dynamic: Any) -> set[str]:
    """Return which sizes GPTQModel's rules have for some modules: what is said holds for others.

    Modules of a rule that begins with "-:" are not in codes.
    """
    sizes = {"bits", "group_size"}
    if not isinstance(dynamic, Mapping):
        return sizes
    rules = [said for rule, said in dynamic.items() if not str(rule).startswith("-:")]
    if not all(isinstance(said, Mapping) for said in rules):
        return sizes
    return sizes & {name for said in rules for name in said}


def _groups(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what compressed-tensors says of weights, for each group of modules."""
    named = table("config_groups", found["config_groups"])
    return [
        table(f"weights of {name}", table(name, group).get("weights") or {})
        for name, group in named.items()
    ]


def _agreed(groups: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what all groups of modules agree on; the tensors say the rest."""
    if not groups:
        return {}
    first = groups[0]
    return {name: first[name] for name in first if all(g.get(name) == first[name] for g in groups)}


def _group_size(weights: Mapping[str, Any]) -> int | None:
    if weights.get("strategy") == "channel":
        return 0
    size = weights.get("group_size")
    return None if size is None else max(integer("group_size", size, least=-1), 0)


def _symmetric(weights: Mapping[str, Any]) -> bool | None:
    for name in ("sym", "symmetric"):
        if isinstance(weights.get(name), bool):
            return bool(weights[name])
    if isinstance(weights.get("zero_point"), bool):  # AWQ
        return not weights["zero_point"]
    return None


def _packing(method: str, found: Mapping[str, Any]) -> str:
    """Return what GPTQ, AWQ, GPTQModel or AutoRound call their layout, without a prefix."""
    if method not in ("gptq", "awq", "auto-round"):
        return ""
    names = ("checkpoint_format", "packing_format", "format", "version")
    said = next((found[name] for name in names if found.get(name)), "")
    packing = str(said).lower().rpartition(":")[2].removeprefix("auto_")
    return "gemm" if packing == "awq" else packing
