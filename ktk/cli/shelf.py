"""What `ktk model` prints."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape

from ktk.checkpoint import open_checkpoint, verify
from ktk.cli import contents
from ktk.cli.verify import document_of, lines_of
from ktk.errors import BackendError, CheckpointError
from ktk.hub import Found, blobs_of, cache_folder, cached_models, find_model, models_in, own_folders
from ktk.hub.names import listed
from ktk.loading import default_backend
from ktk.loading.route import route_of
from ktk.progress import Progress
from ktk.registry import load_backend
from ktk.settings import setting
from ktk.sizes import gigabytes, size_text
from ktk.system import available_memory
from ktk.terminal import doing, plain_table

_NO_EXPERTS = "no experts"


@dataclass(frozen=True)
class Entry:
    """A model of the list.

    Attributes
    ----------
    name, path
        What commands take, and where that is.
    stored
        Formats of its experts.
    nbytes
        Of its files.
    backend
        What would compute it.
    memory
        Bytes of its experts as that packs them, and of all else as it is in the files.
    fault
        Why it cannot be used, or what is wrong with its files; empty where nothing is known.
    """

    name: str
    path: str
    stored: str = ""
    nbytes: int = 0
    backend: str | None = None
    memory: int | None = None
    fault: str = ""


def show_list(*, as_json: bool) -> None:
    """Print all models."""
    folders = own_folders()
    with doing() as step:
        entries = []
        for found in (*cached_models(), *models_in(folders)):
            step(f"looking at {found.name}")
            entries.append(look(found))
    if as_json:
        free = available_memory()
        listed = [asdict(entry) for entry in entries]
        typer.echo(json.dumps({"available_memory": free, "models": listed}, indent=2))
        return
    _print_list(entries, folders)


def show_info(name: str, *, as_json: bool) -> bool:
    """Print all about one model; returns whether its files are there and whole."""
    path = find_model(name)
    entry = look(Found(name, path))
    if as_json:
        typer.echo(
            json.dumps(
                {**asdict(entry), "inspect": contents.document(path, contents.inspect(path))},
                indent=2,
            )
        )
        return not entry.fault
    console = Console(highlight=False)
    console.print(f"[bold]{escape(name)}[/]", soft_wrap=True)
    console.print(f"files: {escape(entry.path)}, {gigabytes(entry.nbytes)}", soft_wrap=True)
    if entry.memory is not None:
        console.print(
            f"memory: {size_text(entry.memory)} with {entry.backend}; "
            f"{size_text(available_memory())} are available"
        )
    for line in filter(None, [_tokenizer(path), entry.fault and f"[red]{escape(entry.fault)}[/]"]):
        console.print(line, soft_wrap=True)
    if entry.fault and not entry.stored:
        return False  # there is nothing to show, and it would be said again
    return contents.show(path, as_json=False) and not entry.fault


def show_verify(name: str, *, as_json: bool) -> bool:
    """Read everything and print what is wrong; returns whether nothing is."""
    path = find_model(name)
    blobs = list(blobs_of(path))
    faults = []
    with Progress(sum(blob.nbytes for blob in blobs), shown=True) as progress:
        for blob in blobs:
            try:
                blob.check(partial(_advance, progress, blob.path.name))
            except CheckpointError as error:
                faults.append(str(error))
        first = progress.total

        def on_expert(layer: int, nbytes: int, total: int) -> None:
            progress.total = first + total
            progress.advance(nbytes, f"layer {layer}")

        result = verify(path, on_expert=on_expert)
    if as_json:
        checked = {"checksums": len(blobs), "files": faults, **document_of(result)}
        typer.echo(json.dumps({**checked, "sound": result.sound and not faults}, indent=2))
    else:
        for line in faults:
            typer.echo(line)
        if blobs:
            read = f"{len(blobs)} files of the hub were read; all have their checksums"
            if faults:
                read = f"{len(faults)} of {len(blobs)} files of the hub are not whole"
            typer.echo(f"{path}: {read}")
        for line in lines_of(result):
            typer.echo(line)
    return result.sound and not faults


def look(found: Found) -> Entry:
    """Read the headers of a model; what is wrong is returned and not raised."""
    stored: dict[str, None] = {}
    names: dict[str, None] = {}
    packed = experts = size = 0
    try:
        size = sum(path.stat().st_size for path in _files(found.path))
        with open_checkpoint(found.path) as checkpoint:
            for error in checkpoint.faults():
                raise error
            numbers = checkpoint.layers()
            if not numbers:
                return Entry(found.name, str(found.path), nbytes=size, fault=_NO_EXPERTS)
            for number in numbers:
                layer = checkpoint.layer(number)
                wanted = setting("backend").value
                backend = load_backend(wanted) if wanted else default_backend(layer)
                names[backend.name] = None
                stored[layer.storage.dtype] = None
                packed += layer.config.num_experts * route_of(layer, backend).packed_nbytes
                experts += layer.nbytes
    except (BackendError, CheckpointError, OSError) as error:
        fault = _unread(error) if isinstance(error, OSError) else str(error)
        return Entry(found.name, str(found.path), ", ".join(stored), size, fault=fault)
    return Entry(
        name=found.name,
        path=str(found.path),
        stored=", ".join(stored),
        nbytes=size,
        backend=", ".join(names),
        memory=packed + max(size - experts, 0),
    )


def _advance(progress: Progress, step: str, nbytes: int) -> None:
    progress.advance(nbytes, step)


def _files(path: Path) -> Sequence[Path]:
    """Return the files of weights; not links to what is gone."""
    if not os.path.isdir(path):
        stem, _, rest = path.name.partition("-00001-of-")
        found = listed(path.parent, f"{stem}-*-of-{rest}") if rest else [path]
    else:
        found = listed(path, "*.safetensors") or listed(path, "*.gguf")
    return [one for one in found if os.path.isfile(one)]


def _tokenizer(path: Path) -> str:
    if path.suffix == ".gguf":
        return ""
    folder = path if os.path.isdir(path) else path.parent
    names = ("tokenizer.json", "tokenizer_config.json")
    there = [one for one in names if os.path.exists(folder / one)]
    if not there:
        return "tokenizer: none in this folder"
    template = os.path.exists(folder / "chat_template.jinja")
    try:
        template = template or '"chat_template"' in (folder / there[-1]).read_text(errors="replace")
    except OSError as error:
        return f"tokenizer: {there[0]}; {_unread(error)}"
    return f"tokenizer: {there[0]}, {'with a' if template else 'no'} chat template"


def _unread(error: OSError) -> str:
    return f"{error.filename} cannot be read: {error.strerror}"


def _print_list(entries: list[Entry], folders: Sequence[str]) -> None:
    console = Console(highlight=False)
    where = ", ".join([str(cache_folder()), *folders])
    usable = [entry for entry in entries if entry.memory is not None]
    if not usable:
        console.print(f"no models with experts in {escape(where)}", soft_wrap=True)
        console.print("hf download NAME gets one; ktk config models FOLDER adds a folder.")
    else:
        free = available_memory()
        table = plain_table(f"free memory: {size_text(free)}")
        for heading in ("model", "stored as", "files", "backend", "memory"):
            table.add_column(heading, overflow="fold")
        for entry in usable:
            memory = size_text(entry.memory or 0)
            if (entry.memory or 0) > free:
                memory = f"[yellow]{memory}, does not fit[/]"
            size = gigabytes(entry.nbytes)
            table.add_row(escape(entry.name), entry.stored, size, entry.backend, memory)
        console.print(table)
    for entry in entries:
        if entry.fault:
            console.print(f"[yellow]not usable:[/] {_line(entry)}", soft_wrap=True)
    if usable:
        console.print("Headers only; ktk model verify MODEL reads everything.")


def _line(entry: Entry) -> str:
    return escape(f"{entry.name}: {' '.join(entry.fault.split())}")
