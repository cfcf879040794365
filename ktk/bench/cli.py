"""`ktk bench`: layers of named shapes against the limits of this machine."""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ktk.bench.shapes import SHAPES, Shape, find_shape
from ktk.checkpoint_options import ACTIVATION, TOP_K
from ktk.system import let_openmp_sleep

if TYPE_CHECKING:
    from ktk.backend import Backend
    from ktk.bench.records import Result, Subject

_TOKENS, _PROMPTS = "1,8,128,512,2048", "512"
# Of seconds and of gigabytes: none means more, and nan and infinity are not below it.
_MOST = 1e9


def _sane(value: float | None) -> float | None:
    """Refuse what Python takes for a number, and nobody can measure with."""
    if value is not None and not value < _MOST:
        raise typer.BadParameter(f"wants a number below {_MOST:g}, got {value}")
    return value


def bench(
    backend: Annotated[
        list[str] | None,
        typer.Option(
            "--backend",
            "-b",
            metavar="NAME",
            help="Backend; may be given several times. Default: all; for a checkpoint that of ktk "
            "config, or else the one that its format decides on.",
        ),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help=f"Layer: {', '.join(SHAPES)}; may be given several times. Default: the first.",
        ),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Time the layers of this model instead: a folder, a GGUF file, or a name of "
            "ktk model list.",
        ),
    ] = None,
    layer: Annotated[
        list[int] | None,
        typer.Option(
            metavar="N",
            min=0,
            help="Layer of the checkpoint; may be given several times. Default: from the first on "
            "as many as it takes to read memory, not a cache.",
        ),
    ] = None,
    tokens: Annotated[
        str,
        typer.Option(
            metavar="T,T",
            help=f"Tokens per call; default: {_TOKENS}, or {_PROMPTS} with --whole.",
        ),
    ] = "",
    threads: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            help="Workers; 0: all physical cores. Default: as ktk config says, or all.",
        ),
    ] = None,
    variant: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Variant (instruction set) of the backends; may be given several times, 'all' for "
            "every one that runs here. Default: what each backend chooses.",
        ),
    ] = None,
    format: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="What the backends store, such as g32, row or g128-zero; may be given several "
            "times, 'all' for every one. Default: what each backend stores by default.",
        ),
    ] = None,
    experts: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Experts of the layer, to fit memory."),
    ] = None,
    rounds: Annotated[
        int, typer.Option(metavar="N", min=1, help="Turns of everything, alternating.")
    ] = 3,
    seconds: Annotated[
        float | None,
        typer.Option(
            metavar="S", min=0.001, callback=_sane, help="Length of one turn; default: 0.5."
        ),
    ] = None,
    rotate: Annotated[
        float | None,
        typer.Option(
            metavar="GB",
            min=0.0,
            callback=_sane,
            help="GB of weights to rotate; default: 4 x the last-level cache, 1 or more.",
        ),
    ] = None,
    noise: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            min=0.0,
            max=1.0,
            callback=_sane,
            help="Share of the CPUs that others may use before a turn is repeated, and no fraction "
            "of a limit is printed; 1: never; default: 0.05.",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON lines, no table.")] = False,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the roofline into this file, such as a PNG."),
    ] = None,
    accuracy: Annotated[
        bool, typer.Option("--accuracy", help="Also compare the outputs with float64.")
    ] = False,
    whole: Annotated[
        bool,
        typer.Option(
            "--whole",
            help="Time all of the checkpoint, as ktk run computes it: prompts of --tokens, and "
            "then single tokens.",
        ),
    ] = False,
    linears: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="With --whole: what computes dense layers; default: of ktk config, or as the "
            "files have it.",
        ),
    ] = None,
    head: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="With --whole: what computes the output head; default: as above."
        ),
    ] = None,
    activation: Annotated[str | None, ACTIVATION] = None,
    top_k: Annotated[int | None, TOP_K] = None,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="With --whole: what has all but the experts, cpu or a GPU, such as cuda; default: "
            "of ktk config, or cpu.",
        ),
    ] = None,
) -> None:
    """Time layers against the limits of this machine.

    Layers and limits take turns, so that both see the same machine. With --checkpoint they are
    those of your own model, and the table has the tokens per second that its experts take, without
    attention and the rest.
    """
    from ktk.settings import setting

    wanted = threads if threads == 0 else setting("threads", threads).value
    counts = _token_counts(tokens or (_PROMPTS if whole else _TOKENS))
    options: dict[str, Any] = {
        "--shape": shape,
        "--experts": experts,
        "--format": format,
        "--accuracy": accuracy,
    }
    others: dict[str, Any] = {"linears": linears, "head": head, "device": device}
    reading = {"activation": activation, "top_k": top_k}
    # A whole model has turns of its own, of so many tokens each.
    timing = {"--rotate": rotate, "--seconds": seconds, "--noise": noise, "--plot": plot}
    if whole:
        options |= {"--layer": layer, "--variant": variant}
        options |= {"--activation": activation, "--top-k": top_k}
        if given := [name for name, value in timing.items() if value is not None]:
            raise typer.BadParameter("not with --whole; leave it out", param_hint=", ".join(given))
    elif given := [name for name, value in others.items() if value is not None]:
        raise typer.BadParameter("needs --whole", param_hint=f"--{given[0]}")
    of_model = {"--layer": layer, "--activation": activation, "--top-k": top_k}
    _refuse_together(checkpoint, of_model, options, whole=whole)
    if whole:
        from ktk._core import WorkerPool
        from ktk.bench.machine import check_threads

        # As many as layers get, which a quota may hold down; the setting does not count.
        others["threads"] = WorkerPool().size if wanted == 0 else wanted
        check_threads(others["threads"] or 0)
        _bench_whole(str(checkpoint), backend, others, counts, rounds, as_json=json)
        return
    shapes = [] if checkpoint else [_shape(name, experts) for name in shape or [next(iter(SHAPES))]]
    if plot:
        from ktk.bench.plot import check_plot

        try:
            check_plot(plot)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--plot") from None
    from ktk.bench.records import Settings
    from ktk.bench.runner import run
    from ktk.terminal import doing

    length_and_noise = {"seconds": seconds, "noise": noise}
    settings = Settings(
        threads=wanted or 0,
        rounds=rounds,
        rotated_bytes=None if rotate is None else int(rotate * 1e9),
        **{name: value for name, value in length_and_noise.items() if value is not None},
    )
    model = None
    if checkpoint:
        from ktk.bench.model import open_model
        from ktk.hub import find_model

        model = open_model(find_model(checkpoint), layer, **reading)
        backend = backend or [setting("backend").value or model.default_backend]
        shapes = [model.shape]
    subjects = _subjects(backend, variant, format)
    results: list[Result] = []
    for chosen in shapes:
        with doing() as step:
            found = run(subjects, chosen, counts, settings, progress=step, model=model)
        results += found
        _show_results(found, as_json=json)
        if accuracy:
            _show_accuracy(subjects, chosen, settings.threads, as_json=json)
    if plot:
        from ktk.bench.plot import draw_roofline

        draw_roofline(results, plot)


def _bench_whole(
    name: str,
    backends: list[str] | None,
    others: dict[str, Any],
    prompts: list[int],
    rounds: int,
    *,
    as_json: bool,
) -> None:
    let_openmp_sleep()
    from rich.console import Console

    from ktk.terminal import doing
    from ktk.text.load import load_text_model

    wanted: list[str | None] = [*backends] if backends else [None]
    for backend in wanted:
        loaded = None  # before the next comes, which needs its memory
        loaded = load_text_model(name, backend=backend, **others)
        from ktk.bench.whole import documents, measure, table_of

        with doing() as step:
            found = measure(loaded, prompts, rounds, step)
        if as_json:
            _print_lines(documents(loaded, found))
        else:
            Console().print(table_of(loaded, found))


def _refuse_together(
    checkpoint: Path | None, of_model: dict[str, Any], options: dict[str, Any], *, whole: bool
) -> None:
    """Refuse options of random layers for a checkpoint, and the other way round."""
    if checkpoint is None and whole:
        raise typer.BadParameter("needs --checkpoint", param_hint="--whole")
    if checkpoint is None and (given := [name for name, value in of_model.items() if value]):
        raise typer.BadParameter("needs --checkpoint", param_hint=given[0])
    given = [name for name, value in options.items() if value] if checkpoint else []
    if given:
        raise typer.BadParameter("the model decides; leave it out", param_hint=", ".join(given))


def _subjects(
    backends: list[str] | None, variants: list[str] | None, formats: list[str] | None
) -> list[Subject]:
    from ktk.bench.records import Subject

    loaded = list(_backends(backends))
    known = {"all", *(variant.name for _, backend in loaded for variant in backend.variants)}
    if loaded and (unknown := [name for name in variants or () if name not in known]):
        raise ValueError(
            f"there is no variant {', '.join(unknown)} of what is timed; "
            f"known: {', '.join(sorted(known))}"
        )
    subjects = [
        Subject(name, variant, fmt)
        for name, backend in loaded
        for fmt in _formats(backend, name, formats)
        for variant in _variants(backend, variants)
    ]
    if not subjects:
        raise ValueError("no backend is installed")
    return subjects


def _backends(wanted: list[str] | None) -> Iterator[tuple[str, Backend]]:
    """Load backends. One that was asked for must load; the others only where they can run."""
    import ktk
    from ktk.errors import BackendUnsupported

    for name in wanted or sorted(ktk.backends()):
        with nullcontext() if wanted else suppress(BackendUnsupported):
            yield name, ktk.load_backend(name)


def _variants(backend: Backend, wanted: list[str] | None) -> list[str | None]:
    if not wanted:
        return [None]
    runnable = [variant.name for variant in backend.variants if variant.runnable]
    chosen = [name for name in runnable if "all" in wanted or name in wanted]
    if not chosen:
        raise ValueError(
            f"{backend.name} has no variant {', '.join(wanted)} that runs here; "
            f"those that do: {', '.join(runnable) or 'none'}"
        )
    return list(chosen)


def _formats(backend: Backend, name: str, wanted: list[str] | None) -> list[str | None]:
    from ktk.bench.weights import choose_format
    from ktk.formats import label

    if not wanted:
        return [None]
    if "all" in wanted:
        return [label(fmt) for fmt in backend.formats]
    for text in wanted:
        choose_format(backend, name, text)
    return list(wanted)


def _token_counts(text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(
            f"wants numbers separated by commas, got {text!r}", param_hint="--tokens"
        ) from None
    if min(counts) < 1:
        raise typer.BadParameter(f"wants at least one token, got {text!r}", param_hint="--tokens")
    return counts


def _shape(name: str, experts: int | None) -> Shape:
    try:
        shape = find_shape(name)
        return shape.with_experts(experts) if experts else shape
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _show_results(results: list[Result], *, as_json: bool) -> None:
    if as_json:
        _print_lines([result.as_dict() for result in results])
        return
    from rich.console import Console

    from ktk.bench.report import results_table

    console = Console()
    console.print(results_table(results, width=console.width))


def _show_accuracy(subjects: list[Subject], shape: Shape, threads: int, *, as_json: bool) -> None:
    from ktk.bench.accuracy import measure_accuracy

    errors = measure_accuracy(subjects, shape, threads=threads)
    if as_json:
        _print_lines([error.as_dict() for error in errors])
        return
    from rich.console import Console

    from ktk.bench.report import accuracy_table

    Console().print(accuracy_table(errors))


def _print_lines(records: list[dict[str, Any]]) -> None:
    for record in records:
        sys.stdout.write(json_module.dumps(record) + "\n")
    sys.stdout.flush()
