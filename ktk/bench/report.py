"""Tables of results for people to read."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from ktk.bench.accuracy import Accuracy
from ktk.bench.records import Result
from ktk.terminal import plain_table

# What the whole table takes. In less, the columns that the others are derived from are left out.
_WIDTH = 78


def results_table(results: Sequence[Result], *, width: int = 80) -> RenderableType:
    """Show one row per backend and number of tokens, and the limits they are measured against.

    In a terminal of less than 80 columns it has the times and what they reach, and no rates.
    """
    first = results[0]
    names = names_of(results)
    title = f"{first.shape}, {first.threads} threads"
    if first.model_layers:
        title += f"; ms: one layer; tokens/s: experts only, of all layers ({first.model_layers})"
    table = plain_table()
    columns = _columns(bool(first.model_layers), wide=width >= _WIDTH)
    # A format's name may take a second line; numbers, and names of backends, may not.
    longest = max(len(r.backend) for r in results)
    table.add_column("backend", overflow="fold", min_width=longest)
    for name in columns:
        left = name in ("variant", "by")
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    tokens = None
    for r in results:
        if tokens not in (None, r.tokens):
            table.add_section()
        tokens = r.tokens
        table.add_row(names[r], *(cell(r) for cell in columns.values()))
    reads = [r.read_gb_per_s for r in results]
    notes = [
        "limit (ms): the larger of packed bytes of the experts hit / read bandwidth, and "
        "operations / peak of the unit (by: which one); reached: limit / time.",
        f"Measured in the same alternation: reading {_range(reads)} GB/s; "
        + "; ".join(
            f"{unit} {_range([r.peak_gflop_per_s for r in results if r.peak_unit == unit])} GFLOP/s"
            for unit in dict.fromkeys(r.peak_unit for r in results if r.peak_unit)
        )
        + f"; {min(r.layers for r in results)} or more layers rotated.",
    ]
    if first.model_layers:
        notes.append(
            f"tokens/s: tokens / ({first.model_layers} x ms): the routed experts of all layers, "
            "without attention, norms and routing; tokens go to random experts."
        )
    doubts: dict[str, list[str]] = {}
    for r in results:
        if r.doubt:
            doubts.setdefault(r.doubt, []).append(f"{names[r]} {r.variant} T={r.tokens}")
    for why, whose in doubts.items():
        notes.append(f"[yellow]reached -: {why}[/] ({', '.join(whose)})")
    return Group(f"[italic]{escape(title)}[/]", table, *notes)


def _columns(of_model: bool, *, wide: bool) -> dict[str, Callable[[Result], str]]:
    """Return what each column says of a result."""
    if not wide:
        rate = {"tokens\n/s": _tokens_per_s} if of_model else {}
        times = {"T": lambda r: str(r.tokens), "ms": lambda r: milliseconds(r.seconds)}
        return {**times, **rate, "rea-\nched": _reached}
    return {
        "variant": lambda r: r.variant,
        "tokens": lambda r: str(r.tokens),
        "ms": lambda r: milliseconds(r.seconds),
        "±": lambda r: f"{r.spread / 2:.0%}",
        "GB/s": lambda r: f"{r.gb_per_s:.1f}",
        **(
            {"tokens/s": _tokens_per_s}
            if of_model
            else {"GFLOP/s": lambda r: f"{r.gflop_per_s:.0f}"}
        ),
        "limit": lambda r: milliseconds(r.limit_seconds),
        "reached": _reached,
        "by": lambda r: {"memory": "mem", "compute": "ops"}[r.bound],
    }


def _tokens_per_s(result: Result) -> str:
    return f"{result.experts_tokens_per_s or 0:.1f}"


def _reached(result: Result) -> str:
    return "-" if result.fraction is None else f"[bold]{result.fraction:.0%}[/]"


def accuracy_table(results: Sequence[Accuracy]) -> RenderableType:
    """Show relative L2 errors, a table for each distribution of weights."""
    tables = []
    for weights in dict.fromkeys(r.weights for r in results):
        table = Table(
            title=f"Relative L2 error, {results[0].shape}, {results[0].tokens} tokens, "
            f"{weights} weights",
            title_justify="left",
            box=SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
        )
        # On a narrow terminal names are broken, and no digit is lost.
        for name in ("backend", "format", "variant"):
            table.add_column(name, overflow="fold")
        for name in ("kernel", "quantization", "total"):
            table.add_column(name, justify="right", overflow="fold", min_width=6)
        for r in results:
            if r.weights == weights:
                errors = (f"{error:.4f}" for error in (r.kernel, r.quantization, r.total))
                table.add_row(r.backend, r.format, r.variant, *errors)
        tables.append(table)
    return Group(*tables)


def names_of(results: Sequence[Result]) -> dict[Result, str]:
    """Name the format beside a backend that comes in several, by what is not common to them."""
    formats: dict[str, set[str]] = {}
    for r in results:
        formats.setdefault(r.backend, set()).add(r.format)
    common = {
        backend: set.intersection(*(set(text.split("-")) for text in labels))
        for backend, labels in formats.items()
    }

    def short(r: Result) -> str:
        own = [word for word in r.format.split("-") if word not in common[r.backend]]
        return f"{r.backend} {'-'.join(own)}".strip()

    return {r: short(r) if len(formats[r.backend]) > 1 else r.backend for r in results}


def milliseconds(seconds: float) -> str:
    """Format a time in milliseconds with the digits that matter."""
    ms = seconds * 1e3
    return f"{ms:.3f}" if ms < 10 else f"{ms:.1f}" if ms < 1000 else f"{ms:.0f}"


def _range(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    if high - low < 0.05 * high:
        return f"{high:.0f}"
    return f"{low:.0f}-{high:.0f}"
