"""Files of counts: how often each expert of each layer was chosen.

    {"format": "ktk.expert_counts", "version": 1,
     "layers": {"3": [17, 0, 4, ...], "4": [...]}}      one number from 0 on for each expert

Text, because people want to look at them, and small: some 90 KB for 58 layers of 256 experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ktk.errors import CheckpointError
from ktk.placement.files import (
    layer_names,
    layers_in,
    read_document,
    whole_numbers,
    write_document,
)

#: Of each layer, by its number: int64 [num_experts].
Counts = dict[int, npt.NDArray[np.int64]]
_FORMAT = "ktk.expert_counts"


class Counted(Protocol):
    """What knows how often its experts were chosen: :class:`ktk.MoE`."""

    @property
    def counts(self) -> npt.NDArray[np.int64]: ...


def save_counts(path: str | Path, counts: Mapping[int, Counted | npt.ArrayLike]) -> None:
    """Write counts to a file, which appears as a whole or not at all.

    Parameters
    ----------
    path : path
    counts : mapping of int to MoE or array [num_experts]
        By number of the layer; a :class:`ktk.Model` is such a mapping.

    Raises
    ------
    ValueError
        There are no layers, one has a number below 0, or counts are no whole numbers from 0 on.
    """
    found = {}
    for name, one in layer_names(counts).items():
        found[name] = whole_numbers(name, getattr(one, "counts", one)).tolist()
    write_document(Path(path), _FORMAT, {"layers": found})


def load_counts(path: str | Path, *, num_experts: int | None = None) -> Counts:
    """Read a file of counts: ktk's, or one of SGLang's recorder of experts (``.pt``).

    Parameters
    ----------
    path : path
        With the ending ``.pt``: a tensor ``logical_count`` [steps, layers, experts], summed over
        its steps. Rows of zeros are layers without experts.
    num_experts : int, optional
        What all layers must have.

    Returns
    -------
    dict of int to int64 array [num_experts]
        By number of the layer, ascending.

    Raises
    ------
    CheckpointError
        The file is missing, damaged, of another kind, or of another number of experts.
    """
    path = Path(path)
    if path.suffix == ".pt":
        from ktk.placement.sglang import counts_of_recorder

        counts = counts_of_recorder(path)
    else:
        document = read_document(path, _FORMAT)
        layers = layers_in(path, document, _is_count)
        counts = {number: np.array(one, np.int64) for number, one in layers.items()}
    for number, one in counts.items():
        if not len(one) or num_experts not in (None, len(one)):
            raise CheckpointError(
                f"{path} has counts of {len(one)} experts for layer {number}, expected "
                f"{num_experts or 'some'}: is it of another model?"
            )
    return counts


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63
