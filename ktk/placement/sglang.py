"""SGLang's files of counts, ``.pt``: its recorder writes and ``--init-expert-location`` reads them.

A dictionary with ``logical_count``, int64 [steps, layers of the model, experts], where layers
without experts have zeros.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from ktk.durable import write_file
from ktk.errors import CheckpointError
from ktk.placement.files import whole_numbers


def save_for_sglang(
    path: str | Path, counts: Mapping[int, npt.ArrayLike], num_layers: int | None = None
) -> None:
    """Write counts for SGLang's ``--init-expert-location``.

    It places experts by them with ``--kt-expert-placement-strategy frequency``.

    Parameters
    ----------
    path : path
    counts : mapping of int to array [num_experts]
        By number of the layer. Masks (1 on the GPU, 0 elsewhere) make SGLang choose just these, if
        it is told their number.
    num_layers : int, optional
        Layers of the model, dense ones too; by default up to the last one that has counts.

    Raises
    ------
    ValueError
        There are no layers, their number is another, or they have different numbers of experts; or
        counts are no whole numbers from 0 on.
    CheckpointError
        The file cannot be written.
    """
    rows = {number: np.asarray(one) for number, one in counts.items()}
    if not rows:
        raise ValueError("there are no layers whose counts could be written")
    sizes = {row.shape for row in rows.values()}
    if len(sizes) != 1 or len(next(iter(sizes))) != 1:
        raise ValueError(
            f"layers have counts of shapes {sorted(map(list, sizes))}, expected [experts], alike"
        )
    if min(rows) < 0:
        raise ValueError(f"layer {min(rows)} has counts, and layers are counted from 0 on")
    total = max(rows) + 1 if num_layers is None else num_layers
    if total <= max(rows):
        raise ValueError(f"layer {max(rows)} has counts, and the model {total} layers")
    made = torch.zeros(1, total, *sizes.pop(), dtype=torch.int64, device="cpu")
    for number, one in rows.items():
        made[0, number] = torch.from_numpy(whole_numbers(number, one))
    data = io.BytesIO()
    torch.save({"logical_count": made}, data)
    try:
        write_file(Path(path), data.getvalue())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror}") from error


def counts_of_recorder(path: Path) -> dict[int, npt.NDArray[np.int64]]:
    """Read what SGLang's recorder wrote; layers that were never used are left out."""
    try:
        # weights_only: a pickle can do anything.
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of a damaged file torch raises nearly anything
        reason = getattr(error, "strerror", None) or "it is no file of tensors"
        raise CheckpointError(f"{path} cannot be read: {reason}") from error
    counts = found.get("logical_count") if isinstance(found, dict) else found
    if not isinstance(counts, torch.Tensor) or counts.ndim != 3 or not counts.numel():
        raise CheckpointError(f"{path} has no logical_count [steps, layers, experts]")
    plain = counts.layout == torch.strided and not (counts.is_nested or counts.is_meta)
    small_float = counts.is_floating_point() and counts.itemsize == 1
    if not plain or small_float or counts.is_complex():
        raise CheckpointError(f"{path} has a logical_count without plain numbers")
    whole = counts.to(torch.int64)
    # As the dtype that came: torch does not compare uint64 with int64.
    if (whole < 0).any() or not torch.equal(whole.to(counts.dtype), counts):
        raise CheckpointError(f"{path} has counts that are no whole numbers from 0 on")
    sums = whole.cumsum(0)  # the first that is beyond 64 bits is below 0
    if (sums < 0).any():
        raise CheckpointError(f"{path} has counts whose sums are beyond 64 bits")
    total = sums[-1]
    return {n: row.numpy() for n, row in enumerate(total) if row.any()}
