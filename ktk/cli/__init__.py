"""Command line of ktk: one module per command, imported when the command is used."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ktk.bench.cli import bench
from ktk.checkpoint_options import ACTIVATION, MODULE, TOP_K
from ktk.cli import compat, models, text
from ktk.cli.serve import serve
from ktk.names import FEWER_BITS

MODEL = "Folder of safetensors or packed files, GGUF file, or a name of ktk model list."

app = typer.Typer(
    name="ktk",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    # Plain text: no tables to break at 40 columns, and nothing to import for it.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"ktk {version('ktk')}")
        raise typer.Exit


@app.callback()
def ktk(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version",
            "-V",
            callback=_print_version,
            is_eager=True,
            help="Print the version and exit.",
        ),
    ] = False,
) -> None:
    """CPU kernels for the routed experts of Mixture-of-Experts models.

    Exit status: 0 fine, 1 a fault, 2 a wrong command line, 130 interrupted.
    """


@app.command()
def version(
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of lines.")] = False,
) -> None:
    """Print versions, the CPU and what backends run.

    Of ktk, Python and torch, and for each backend the variant that would run here.
    """
    from ktk.cli.version import show

    show(as_json=json)


@app.command()
def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of lines.")] = False,
) -> None:
    """Say what is in the way here, and what helps.

    Names the resource that binds: instruction sets, quota, mask and other users of CPUs, hardware
    threads, frequency, NUMA, memory, swap, huge pages. Also looks at drivers and backends, and
    watches for half a second what others do. The exit status is 1 if something does not work.
    """
    from ktk.cli.health import examine, show

    if not show(examine(), as_json=json):
        raise typer.Exit(1)


@app.command(short_help="Show what a checkpoint holds.")
def inspect(
    path: Annotated[Path, typer.Argument(metavar="MODEL", help=MODEL)],
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    training: Annotated[
        bool, typer.Option("--training", help="Also show what fine-tuning its experts takes.")
    ] = False,
    rank: Annotated[int, typer.Option(min=1, help="Of the adapter that is trained.")] = 16,
    escapes: Annotated[
        bool,
        typer.Option(
            "--escapes", help=f"Also read its bf16 weights: what {FEWER_BITS} makes of them."
        ),
    ] = False,
    module: Annotated[str | None, MODULE] = None,
    activation: Annotated[str | None, ACTIVATION] = None,
    top_k: Annotated[int | None, TOP_K] = None,
) -> None:
    """Show what a checkpoint holds, layer by layer, and the memory that each backend would take.

    Reads headers only, without --escapes: ktk verify reads the weights. The exit status is 1 if a
    layer is incomplete, or its headers are damaged.
    """
    from ktk.cli.contents import show
    from ktk.hub import find_model

    adapter = rank if training else None
    reading = {"module": module, "activation": activation, "top_k": top_k}
    if not show(find_model(path), as_json=json, rank=adapter, escapes=escapes, **reading):
        raise typer.Exit(1)


@app.command(short_help="Read all weights of a checkpoint and name what is wrong.")
def verify(
    path: Annotated[Path, typer.Argument(metavar="MODEL", help=MODEL)],
    layers: Annotated[
        str | None, typer.Option(help="Layers such as 0-3,5; default: all that have experts.")
    ] = None,
    module: Annotated[str | None, MODULE] = None,
    activation: Annotated[str | None, ACTIVATION] = None,
    top_k: Annotated[int | None, TOP_K] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of lines.")] = False,
) -> None:
    """Read all experts of a checkpoint and name what is wrong: file, tensor and expert.

    Packed files: the checksum of every tensor of every expert, headers, index, missing and surplus
    layers. Safetensors and GGUF files: every tensor of every expert is there, whole, and of the
    shape that the configuration means. All: float weights and scales are finite. Memory holds one
    expert. The exit status is 1 if something is wrong.
    """
    from ktk.cli.verify import show
    from ktk.hub import find_model

    reading = {"module": module, "activation": activation, "top_k": top_k}
    if not show(find_model(path), layers=_layers(layers), as_json=json, **reading):
        raise typer.Exit(1)


@app.command()
def backends(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Say everything about this one.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show what backends run here, and why others not."""
    from ktk.cli.report import show_backends

    show_backends(name, as_json=json)


@app.command()
def demo(
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="A model of your own, as of ktk inspect; a small one is made without it.",
        ),
    ] = None,
    layer: Annotated[
        int | None,
        typer.Option(metavar="N", help="Layer of it; default: the first one that has experts."),
    ] = None,
    backend: Annotated[
        list[str] | None,
        typer.Option(
            "--backend", "-b", metavar="NAME", help="Only this backend; may be given several times."
        ),
    ] = None,
    activation: Annotated[str | None, ACTIVATION] = None,
    top_k: Annotated[int | None, TOP_K] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Run a layer through every backend.

    Of a checkpoint, or of a small one that is made for it: how accurate, how fast.
    """
    from ktk.demo import run_demo
    from ktk.hub import find_model
    from ktk.pool import set_default_threads
    from ktk.settings import setting

    if (threads := setting("threads").value) is not None:
        set_default_threads(threads)
    run_demo(
        checkpoint=checkpoint and find_model(checkpoint),
        layer=layer,
        names=backend or None,
        as_json=json,
        activation=activation,
        top_k=top_k,
    )


@app.command(short_help="Write a model as a backend stores it, or in another format.")
def convert(
    source: Annotated[Path, typer.Argument(metavar="INPUT", help=MODEL)],
    output: Annotated[Path, typer.Argument(help="Folder to write; new or empty.")],
    backend: Annotated[
        str | None, typer.Option(help="Pack the experts for this backend; see ktk backends.")
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT",
            help="Write a whole checkpoint whose experts are int4, fp8, nvfp4 or mxfp4, as "
            "compressed-tensors stores them.",
        ),
    ] = None,
    group_size: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Columns that share a scale, 0 for whole rows; default: those of the source, or "
            "what the backend likes best; of int4, 128 where that divides the sizes.",
        ),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(help="Layers such as 0-3,5, with --backend; default: all that have experts."),
    ] = None,
    module: Annotated[str | None, MODULE] = None,
    activation: Annotated[str | None, ACTIVATION] = None,
    top_k: Annotated[int | None, TOP_K] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Keep each layer that an earlier run finished, if its checksums are right and its "
            "part of INPUT is what it was. Where files of INPUT have another time, size or inode "
            "(a copy, say), this reads INPUT again to see that; layers whose weights differ are "
            "made again, and with --to all are.",
        ),
    ] = False,
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="Experts that are encoded at a time; default: one per CPU."),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print JSON of what was made, when it is done.")
    ] = False,
) -> None:
    """Write the experts of a model as a backend stores them, or a checkpoint in another format.

    With --backend, to be loaded often by ktk: OUTPUT holds experts and config.json only, no
    tokenizer, no attention, no shared experts. Keep INPUT for those. ktk verify OUTPUT reads all of
    it and checks it.

    With --to, for vLLM, SGLang, transformers and ktk: OUTPUT is a whole model. Experts are
    quantised, all else is copied. INPUT is a folder of safetensors files.

    Progress goes to stderr: a bar on a terminal, a line per layer or file elsewhere.
    """
    from ktk.hub import find_model

    wanted = _layers(layers)
    if (backend is None) == (to is None):
        raise typer.BadParameter(
            "give one of them: a backend of ktk, or a format for other programs, too",
            param_hint="--backend, --to",
        )
    if to is not None:
        from ktk.cli.convert_to import run_convert_to
        from ktk.conversion.compressed import TARGETS

        if to not in TARGETS:
            raise typer.BadParameter(f"{to!r} is none of {', '.join(TARGETS)}", param_hint="--to")
        if wanted is not None:
            raise typer.BadParameter("--to converts all layers", param_hint="--layers")
        if module is not None:
            raise typer.BadParameter("--to converts the language model", param_hint="--module")
        if activation is not None or top_k is not None:
            raise typer.BadParameter("--to copies config.json", param_hint="--activation, --top-k")
        run_convert_to(
            find_model(source),
            output,
            to=to,
            group_size=group_size,
            resume=resume,
            threads=threads,
            as_json=json,
        )
        return
    from ktk.cli.convert import run_convert

    assert backend is not None
    run_convert(
        find_model(source),
        output,
        backend=backend,
        group_size=group_size,
        layers=wanted,
        module=module,
        activation=activation,
        top_k=top_k,
        resume=resume,
        threads=threads,
        as_json=json,
    )


def _layers(text: str | None) -> list[int] | None:
    from ktk.cli.convert import parse_layers

    try:
        return None if text is None else parse_layers(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--layers") from None


@app.command(short_help="Choose the experts that a GPU holds.")
def placement(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="COUNTS",
            help="File of ktk.placement.save_counts, or .pt of SGLang's recorder of experts; a "
            "model, where the strategy needs no counts.",
        ),
    ],
    strategy: Annotated[
        str, typer.Option(help="frequency, uniform, front-loading or random.")
    ] = "frequency",
    per_layer: Annotated[
        int | None,
        typer.Option("--gpu-experts", "-n", metavar="N", min=0, help="For each layer, on average."),
    ] = None,
    ratio: Annotated[
        float | None,
        typer.Option(metavar="R", min=0.0, max=1.0, help="Part of all experts, instead of -n."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Masks for KTMoEWrapper, as JSON."),
    ] = None,
    sglang: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.pt",
            help="What SGLang's --init-expert-location takes, with "
            "--kt-expert-placement-strategy frequency and as many experts.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Of random.")] = 42,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Choose the experts that a GPU holds, and show how many choices of tokens go there.

    By how often each was chosen (frequency), the lowest of each layer (uniform), all of the first
    layers (front-loading), or at random: as SGLang with kt-kernel does.
    """
    from ktk.cli.placement import run_placement
    from ktk.ktmoe.masks import STRATEGIES

    if strategy not in STRATEGIES:
        raise typer.BadParameter(
            f"{strategy!r} is none of {', '.join(STRATEGIES)}", param_hint="--strategy"
        )
    if (per_layer is None) == (ratio is None):
        raise typer.BadParameter("give one of them", param_hint="--gpu-experts, --ratio")
    run_placement(
        source,
        strategy=strategy,
        per_layer=per_layer,
        ratio=ratio,
        output=output,
        sglang=sglang,
        seed=seed,
        as_json=json,
    )


@app.command()
def config(
    key: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="Without it all of them are shown."),
    ] = None,
    value: Annotated[
        list[str] | None, typer.Argument(help="What to set it to; of models several folders.")
    ] = None,
    unset: Annotated[bool, typer.Option("--unset", help="Take NAME out of the file.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show or set what commands do where no option says so.

    What counts is an option, else a variable such as KTK_BACKEND, else the file that this command
    writes.
    """
    from ktk.cli.config import run_config

    run_config(key, value or [], unset=unset, as_json=json)


app.command()(bench)
app.command()(text.run)
app.command()(text.chat)
app.command()(serve)
app.add_typer(compat.app, name="compat")
app.add_typer(models.app, name="model")
