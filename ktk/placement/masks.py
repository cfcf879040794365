"""Which experts live on a GPU: by one of kt-kernel's strategies, and as a file.

{"format": "ktk.gpu_experts", "version": 1, "num_experts": 128,
 "layers": {"3": [0, 5, 17], "4": [], ...}}          numbers of the experts on the GPU
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from ktk.errors import CheckpointError
from ktk.ktmoe.arguments import at_least
from ktk.ktmoe.masks import STRATEGIES, generate_gpu_experts_masks
from ktk.placement.files import layer_names, layers_in, read_document, write_document

__all__ = ["STRATEGIES", "load_masks", "place", "save_masks"]

#: Of each layer, by its number: bool [num_experts], True on the GPU.
Masks = dict[int, torch.Tensor]
_FORMAT = "ktk.gpu_experts"


def place(
    counts: Mapping[int, npt.ArrayLike],
    num_gpu_experts: int,
    strategy: str = "frequency",
    *,
    seed: int = 42,
) -> Masks:
    """Choose the experts of a model that its GPU holds.

    Parameters
    ----------
    counts : mapping of int to array [num_experts]
        How often each expert was chosen, by number of the layer: :func:`load_counts`. Only
        "frequency" looks at more than their shapes.
    num_gpu_experts, strategy, seed
        As of :func:`ktk.generate_gpu_experts_masks`.

    Returns
    -------
    dict of int to bool tensor [num_experts], in CPU memory
        By number of the layer, as ``gpu_experts_mask`` of :class:`ktk.KTMoEWrapper` takes them.

    Raises
    ------
    ValueError
        Layers have different numbers of experts, there is no such strategy, or num_gpu_experts is
        no number from 0 on.
    """
    at_least("num_gpu_experts", num_gpu_experts, 0)
    rows = {number: np.asarray(counts[number], np.float64) for number in sorted(counts)}
    sizes = {row.size for row in rows.values()}
    if len(sizes) != 1:
        raise ValueError(f"layers have {sorted(sizes)} experts: only layers alike can be placed")
    frequency = torch.from_numpy(np.stack(list(rows.values())))
    masks = generate_gpu_experts_masks(frequency, num_gpu_experts, strategy, seed=seed)
    return dict(zip(rows, masks, strict=True))


def save_masks(path: str | Path, masks: Mapping[int, torch.Tensor]) -> None:
    """Write masks to a file, which appears as a whole or not at all.

    Parameters
    ----------
    path : path
    masks : mapping of int to bool tensor or array [num_experts]
        Of each layer; True on the GPU.

    Raises
    ------
    ValueError
        There are no layers, one has a number below 0, or other numbers of experts than the others.
    TypeError
        A mask is something else, such as the numbers of experts.
    """
    layers, sizes = {}, set()
    for name, given in layer_names(masks).items():
        mask = torch.as_tensor(given, device="cpu")
        if mask.dtype != torch.bool or mask.ndim != 1 or not len(mask):
            raise TypeError(
                f"layer {name}: a mask must be bool [num_experts], got {mask.dtype} "
                f"{list(mask.shape)}"
            )
        sizes.add(len(mask))
        layers[name] = torch.nonzero(mask).flatten().tolist()
    if len(sizes) != 1:
        raise ValueError(f"layers have {sorted(sizes)} experts: a file holds layers alike")
    write_document(Path(path), _FORMAT, {"num_experts": sizes.pop(), "layers": layers})


def load_masks(path: str | Path, *, num_experts: int | None = None) -> Masks:
    """Read a file of masks.

    Parameters
    ----------
    path : path
    num_experts : int, optional
        What the model's layers have.

    Raises
    ------
    CheckpointError
        The file is missing, damaged, of another kind, or of another number of experts.
    """
    path = Path(path)
    document = read_document(path, _FORMAT)
    count = document.get("num_experts")
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise CheckpointError(f"{path} has {count!r} experts, expected a number from 1 on")
    if num_experts not in (None, count):
        raise CheckpointError(
            f"{path} is of layers of {count} experts, the model has {num_experts}: is it of "
            "another model?"
        )
    masks = {}
    for number, experts in layers_in(path, document, lambda e: type(e) is int).items():
        wrong = [expert for expert in experts if not 0 <= expert < count]
        if wrong:
            raise CheckpointError(
                f"{path}, layer {number}: expert {wrong[0]} is not one of {count}"
            )
        masks[number] = torch.zeros(count, dtype=torch.bool, device="cpu")
        masks[number][experts] = True
    return masks
