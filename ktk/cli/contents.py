"""`ktk inspect`: what a checkpoint holds, and what each backend would make of it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ktk.checkpoint import open_checkpoint
from ktk.checkpoint.config import widths_differ
from ktk.checkpoint.spans import spans
from ktk.checkpoint.traffic import stored_bytes_per_token
from ktk.cli.escapes import count_escapes, escapes_table
from ktk.cli.training import training_memory, training_table
from ktk.errors import BackendError, CheckpointError, CheckpointFormatError
from ktk.loading import default_backend
from ktk.loading.route import route_of
from ktk.registry import backends, load_backend
from ktk.sizes import gigabytes, size_text
from ktk.system import available_memory
from ktk.terminal import plain_table

if TYPE_CHECKING:
    from ktk.checkpoint.reader import CheckpointReader, LayerReader


_HEADINGS = ("layers", "names", "experts", "stored as", "bytes")
# Of the terminal, below which five columns would tear words.
_WIDTH = 72


@dataclass(frozen=True)
class Use:
    """What a backend would make of a layer: bytes, format and way there, or why there is none."""

    nbytes: int | None = None
    stored: str | None = None
    reason: str | None = None
    how: str | None = None


@dataclass(frozen=True)
class LayerReport:
    """One layer; `error` is why it cannot be loaded, and then the rest is missing.

    `model_hidden_size` is None where the model is as wide as its experts.
    """

    number: int
    family: str = ""
    stored: str = ""
    num_experts: int = 0
    num_experts_per_tok: int = 0
    hidden_size: int = 0
    model_hidden_size: int | None = None
    intermediate_size: int = 0
    activation: str = ""
    gated: bool = True
    zero_expert_num: int = 0
    nbytes: int = 0
    default_backend: str | None = None
    backends: dict[str, Use] = field(default_factory=dict)
    error: str | None = None

    @property
    def kind(self) -> tuple[Any, ...]:
        """What layers have in common that are shown in one row."""
        return tuple(value for name, value in asdict(self).items() if name != "number")


def inspect(path: Path, **options: Any) -> list[LayerReport]:
    """Describe all layers; options of `open_checkpoint`. A damaged one is reported, not raised."""
    with open_checkpoint(path, **options) as checkpoint:
        numbers = checkpoint.layers()
        if not numbers:
            raise CheckpointError(f"{path} has no experts that ktk knows by name")
        return [_report(checkpoint, number) for number in numbers]


def bytes_per_token(path: Path, layers: list[LayerReport], **options: Any) -> dict[str, int]:
    """Return what a token reads of a checkpoint, by part; nothing if a part is damaged.

    Options are those of `open_checkpoint`.
    """
    if any(layer.error for layer in layers):
        return {}
    try:
        with open_checkpoint(path, **options) as checkpoint:
            return stored_bytes_per_token(checkpoint, layers)
    except CheckpointError:
        return {}


def show(
    path: Path,
    *,
    as_json: bool,
    rank: int | None = None,
    escapes: bool = False,
    **options: Any,
) -> bool:
    """Print what a checkpoint holds; returns whether all of it is in order.

    Further options are those of `open_checkpoint`.

    With the rank of an adapter, also what training it takes; with `escapes`, what BF16Z makes of
    its weights, which are read for that.
    """
    layers = inspect(path, **options)
    # What is beside the experts of one of several modules belongs to all.
    reads = {} if options.get("module") else bytes_per_token(path, layers, **options)
    memory = None if rank is None else training_memory(layers, rank)
    counted = count_escapes(path, **options) if escapes else None
    if as_json:
        found = document(path, layers) | {"bytes_per_token": reads}
        if counted is not None:
            found |= {"checked": "headers and bf16 weights", "escapes": counted.document()}
        typer.echo(json.dumps(found | ({"training": asdict(memory)} if memory else {}), indent=2))
    else:
        console = Console()
        console.print(_layer_table(path, layers, narrow=console.width < _WIDTH))
        for line in _widths(layers):
            console.print(line, highlight=False)
        console.print(_backend_table(layers))
        if reads:
            parts = ", ".join(f"{part} {gigabytes(size)}" for part, size in reads.items())
            console.print(f"A token reads, as stored: {parts}.", highlight=False)
        if memory is not None:
            console.print(training_table(memory))
        if counted is None:
            console.print("Headers only; ktk verify reads the weights.", highlight=False)
        else:
            if counted.layers:
                console.print(escapes_table(counted))
            if counted.reason:
                console.print(counted.reason, highlight=False)
    return not any(layer.error for layer in layers)


def document(path: Path, layers: list[LayerReport]) -> dict[str, Any]:
    """Return what `--json` prints."""
    return {
        "path": str(path),
        "checked": "headers",
        "nbytes": sum(layer.nbytes for layer in layers),
        "available_memory": available_memory(),
        "backends": {name: asdict(use) for name, use in totals(layers).items()},
        "layers": [asdict(layer) for layer in layers],
    }


def totals(layers: Iterable[LayerReport]) -> dict[str, Use]:
    """Add up what each backend would take; one that refuses a layer has that reason."""
    found: dict[str, Use] = {}
    for layer in layers:
        for name, use in layer.backends.items():
            before = found.get(name, Use(0))
            if before.nbytes is None or use.nbytes is None:
                found[name] = Use(reason=before.reason or use.reason)
            else:
                stored, how = (
                    "; ".join(dict.fromkeys(filter(None, both)))
                    for both in ((before.stored, use.stored), (before.how, use.how))
                )
                found[name] = Use(before.nbytes + use.nbytes, stored, how=how)
    return found


def _report(checkpoint: CheckpointReader, number: int) -> LayerReport:
    try:
        layer = checkpoint.layer(number)
        config = layer.config
        family, stored = layer.storage
    except CheckpointError as error:
        return LayerReport(number, error=str(error))
    try:
        chosen = default_backend(layer).name
    except (BackendError, CheckpointError):
        chosen = None
    return LayerReport(
        number=number,
        family=family,
        stored=stored,
        num_experts=config.num_experts,
        num_experts_per_tok=config.num_experts_per_tok,
        hidden_size=config.hidden_size,
        model_hidden_size=config.model_hidden_size,
        intermediate_size=config.intermediate_size,
        activation=config.activation,
        gated=config.gated,
        zero_expert_num=config.zero_expert_num,
        nbytes=layer.nbytes,
        default_backend=chosen,
        backends={name: _use(layer, name, config.num_experts) for name in backends()},
    )


def _use(layer: LayerReader, name: str, experts: int) -> Use:
    try:
        backend = load_backend(name)
        route = route_of(layer, backend)
    except BackendError as error:
        return Use(reason=error.brief)
    except CheckpointFormatError as error:
        return Use(reason=str(error))
    stored = dict.fromkeys(map(str, route.stored.values()))
    return Use(experts * route.packed_nbytes, ", ".join(stored), how=route.how)


def _layer_table(path: Path, layers: list[LayerReport], *, narrow: bool) -> Table:
    table = plain_table(escape(str(path)))
    for heading in ("layers", "experts", "bytes") if narrow else _HEADINGS:
        table.add_column(heading, overflow="fold")
    for _, alike in groupby(layers, key=lambda layer: layer.kind):
        group = list(alike)
        one = group[0]
        numbers = spans([layer.number for layer in group])
        if one.error:
            table.add_row(numbers, f"[red]{escape(one.error)}[/]")
            continue
        zero = f" and {one.zero_expert_num} zero experts" if one.zero_expert_num else ""
        experts = (
            f"{one.num_experts} of {one.hidden_size} x {one.intermediate_size}{zero}, "
            f"{one.num_experts_per_tok} per token, {one.activation}"
        )
        size = size_text(sum(layer.nbytes for layer in group))
        if narrow:
            table.add_row(numbers, f"{experts}; {one.family}; {one.stored}", size)
        else:
            table.add_row(numbers, one.family, experts, one.stored, size)
    return table


def _widths(layers: list[LayerReport]) -> dict[str, None]:
    """Return what to say of experts that have another width than their model, once."""
    return dict.fromkeys(
        f"The {widths_differ(one.hidden_size, one.model_hidden_size)}."
        for one in layers
        if one.model_hidden_size is not None
    )


def _backend_table(layers: list[LayerReport]) -> Table:
    free = available_memory()
    chosen = {layer.default_backend for layer in layers}
    table = plain_table(f"all of it, packed; free memory: {size_text(free)}")
    for heading in ("backend", "memory", "weights"):
        table.add_column(heading, overflow="fold")
    # What cannot be used comes last.
    for name, use in sorted(totals(layers).items(), key=lambda item: item[1].nbytes is None):
        title = f"{name} (default)" if name in chosen else name
        if use.nbytes is None:
            table.add_row(title, "[dim]-[/]", f"[dim]{escape(use.reason or '')}[/]")
            continue
        memory = size_text(use.nbytes)
        if use.nbytes > free:
            memory = f"[yellow]{memory}, does not fit[/]"
        table.add_row(title, memory, f"{use.stored}: {use.how}")
    return table
