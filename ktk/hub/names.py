"""Finds models by name: in the cache of the Hugging Face hub, and in the user's own folders.

A name is a path, OWNER/NAME of the hub, or what a model is called in one of the folders; @REVISION
and :FILE.gguf, or its folder or a part of its name, may follow. Nothing is downloaded. The cache
is read as huggingface_hub lays it out:

    models--OWNER--NAME/refs/REVISION       the commit that a branch or tag means
                        snapshots/COMMIT    links to files in ../blobs, named by their checksums
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ktk.checkpoint.detect import is_model, models_below
from ktk.errors import CheckpointError
from ktk.settings import setting

_NAME = re.compile(
    r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)"
    r"(@(?P<revision>[\w./-]+))?(:(?P<file>[^:]+))?"
)
# Of a split GGUF model the first file stands for all.
_LATER_SHARD = re.compile(r".*-(?!00001)\d{5}-of-\d{5}\.gguf")
_MAIN = "main"


@dataclass(frozen=True)
class Found:
    """A model that is here: the name that commands take for it, and where its files are."""

    name: str
    path: Path
    cached: bool = False


def cache_folder() -> Path:
    """Return where huggingface_hub keeps what it downloads."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if folder := os.environ.get(variable):
            return _expanded(folder)
    home = os.environ.get("HF_HOME")
    if not home:
        home = os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return _expanded(home) / "hub"


def find_model(name: str | Path, folders: Sequence[str] | None = None) -> Path:
    """Return the folder or the GGUF file of a model.

    Parameters
    ----------
    name
        See above. A path that exists is returned as it is.
    folders
        The user's own; by default those of `ktk config models`.

    Raises
    ------
    CheckpointError
        There is none; the message says how to get it.
    """
    path, name = Path(name), str(name)
    if os.path.lexists(path):
        return path
    folders = own_folders() if folders is None else folders
    for folder in folders:
        for candidate in (Path(folder, name), Path(folder, f"{name}.gguf")):
            if os.path.lexists(candidate):
                return candidate
    match = _NAME.fullmatch(name)
    if match and not os.path.exists(path.parent):
        return _in_cache(match["name"], match["revision"], match["file"])
    known = [found.name for found in (*cached_models(), *models_in(folders))]
    close = difflib.get_close_matches(name, known, n=2, cutoff=0.6)
    # The name of a model of the hub without its owner.
    close += [one for one in known if one.rpartition("/")[2] == name and one not in close]
    hint = f". Did you mean {' or '.join(close)}?" if close else ""
    raise CheckpointError(
        f"{name} is missing: there is no such folder or file, and no model of that name in "
        f"{', '.join([str(cache_folder()), *folders])}{hint}"
    )


def own_folders() -> list[str]:
    """Return the folders of `ktk config models`."""
    return setting("models").value or []


def cached_models() -> Iterator[Found]:
    """Yield the models in the hub's cache whose files are of a kind that ktk reads."""
    for folder in listed(cache_folder(), "models--*--*"):
        name = folder.name.removeprefix("models--").replace("--", "/", 1)
        commit = _commit(folder, None)
        for snapshot in _snapshots(folder):
            called = name if snapshot.name == commit else f"{name}@{snapshot.name}"
            yield from _models(called, snapshot, cached=True)


def models_in(folders: Sequence[str]) -> Iterator[Found]:
    """Yield the models in folders of the user's."""
    for text in folders:
        folder, seen = Path(text), set[Path]()
        if is_model(folder):
            for found in _models(str(folder), folder):
                seen.add(found.path)
                yield found
        for path in models_below(folder):
            for found in _models(str(path.relative_to(folder)), path):
                if found.path not in seen:
                    yield found


def listed(folder: Path, pattern: str) -> list[Path]:
    """Return what a folder has by a pattern, sorted; nothing if it may not be read, or is gone."""
    try:
        return sorted(folder.glob(pattern))
    except OSError:
        return []


def _models(name: str, path: Path, *, cached: bool = False) -> Iterator[Found]:
    """Yield the model in a folder, or those of its GGUF files."""
    files = _gguf_files(path)
    if not files and is_model(path):
        yield Found(name, path, cached)
    for file in files:
        within = file.relative_to(path)
        yield Found(f"{name}:{within}" if cached else str(Path(name, within)), file, cached)


def _gguf_files(folder: Path) -> list[Path]:
    """Return the GGUF models in a folder and in those below it; none beside safetensors.

    Large models are published so: a folder of shards for each type of quantisation.
    """
    if listed(folder, "*.safetensors"):
        return []
    files = listed(folder, "*.gguf") + listed(folder, "*/*.gguf")
    return [file for file in files if not _LATER_SHARD.fullmatch(file.name)]


def _in_cache(name: str, revision: str | None, file: str | None) -> Path:
    folder = cache_folder() / f"models--{name.replace('/', '--')}"
    command = f"hf download {name}" + (f" --revision {revision}" if revision else "")
    commit = _commit(folder, revision)
    snapshot = folder / "snapshots" / commit if commit else None
    if snapshot is None or not os.path.isdir(snapshot):
        others = ", ".join(one.name for one in _snapshots(folder))
        also = f" There are other revisions of it: {others}, given as {name}@REVISION." * bool(
            others
        )
        raise CheckpointError(
            f"there is no folder {name}, and {cache_folder()} has no such model.{also} "
            f"If it is one of the Hugging Face hub, download it: {command}"
        )
    found = _gguf_files(snapshot)
    if not found and not is_model(snapshot):
        raise CheckpointError(
            f"{snapshot} has neither config.json nor weights, so {name} was downloaded in part "
            f"only. Get the rest: {command}"
        )
    within = {one: str(one.relative_to(snapshot)) for one in found}
    if file is None:
        below = [one for one in found if one.parent != snapshot]
        if below and len(found) > 1:
            listed = ", ".join(within.values())
            raise CheckpointError(f"{name} has several models: give {name}:FILE, of {listed}")
        return below[0] if below else snapshot
    wanted = file.lower()
    meant = [one for one, path in within.items() if wanted in path.lower()]
    called = [one for one in meant if wanted in _names(one, within[one])]
    exact = [one for one in meant if within[one] == file] or called or meant
    if len(exact) == 1:
        return exact[0]
    listed = ", ".join(within[one] for one in exact or found) or "none"
    raise CheckpointError(
        f"{'several' if exact else 'no'} GGUF files of {name} are called {file!r}: {listed}. "
        f"Give one of them, or get another: {command} --include '*{file}*'"
    )


def _names(file: Path, within: str) -> tuple[str, ...]:
    """Return what a file of a repository may be called: its path there, its name, its folder."""
    return within.lower(), file.name.lower(), *(part.lower() for part in Path(within).parts[:-1])


def _commit(folder: Path, revision: str | None) -> str | None:
    """Return the commit that a revision means: of a branch or tag, or itself."""
    try:
        return (folder / "refs" / (revision or _MAIN)).read_text().strip()
    except (OSError, UnicodeDecodeError):
        pass
    found = [one.name for one in _snapshots(folder) if one.name.startswith(revision or "")]
    return found[0] if len(found) == 1 else None


def _snapshots(folder: Path) -> list[Path]:
    return [path for path in listed(folder, "snapshots/*") if os.path.isdir(path)]


def _expanded(text: str) -> Path:
    return Path(os.path.expandvars(text)).expanduser()
