"""Where the parts of a model are: experts may be packed, and all else with their source."""

from __future__ import annotations

from pathlib import Path

from ktk.checkpoint.detect import is_packed
from ktk.errors import CheckpointError
from ktk.hub import find_model


def parts_of(name: str, source: str | None = None) -> tuple[Path, Path | None]:
    """Return where a model is, and its experts if they are elsewhere.

    Parameters
    ----------
    name
        As of `ktk.hub.find_model`.
    source
        Of a folder that `ktk convert` made: what it was made of. By default the model of the
        recorded name beside it.

    Raises
    ------
    CheckpointError
        The model is not here, or the source of packed files is not.
    ImportError
        transformers is not installed.
    """
    path = find_model(name)
    if not is_packed(path):
        if source is not None:
            raise CheckpointError(f"--source is for folders of ktk convert, and {path} is none")
        return path, None
    if source is not None:
        return find_model(source), path
    from ktk.transformers.load import locate

    try:
        return Path(locate(path).name), path
    except CheckpointError as error:
        raise CheckpointError(f"{error}. Commands take it as --source") from None
