"""The options of `ktk run` and `ktk chat`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ktk.system import let_openmp_sleep

if TYPE_CHECKING:
    from ktk.text.generate import Sampling
    from ktk.text.load import Loaded

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Folder, GGUF file, folder that ktk convert wrote, or a name of ktk model list.",
    ),
]
Backend = Annotated[
    str | None,
    typer.Option(
        "--backend",
        "-b",
        metavar="NAME",
        help="What computes the experts; default: of ktk config, or as the format decides.",
    ),
]
Linears = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="What computes dense layers; default: as the files have it."),
]
Head = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="What computes the output head; default: as above."),
]
Device = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Has all but the experts: cpu or a GPU, such as cuda; default: of ktk config, or cpu.",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Default: of ktk config, or one per physical core."),
]
Source = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="What a folder of ktk convert was made of, for tokenizer and attention; default: the "
        "model of that name beside it.",
    ),
]
System = Annotated[
    str | None, typer.Option(metavar="TEXT", help="What the model is told before all else.")
]
MaxTokens = Annotated[
    int, typer.Option("--max-tokens", "-n", metavar="N", min=1, help="Of a reply, at most.")
]


def _finite(value: float | None) -> float | None:
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"wants a finite number, got {value}")
    return value


Temperature = Annotated[
    float | None,
    typer.Option(
        metavar="T",
        min=0.0,
        callback=_finite,
        help="Default: as the model's generation_config says.",
    ),
]
TopP = Annotated[
    float | None,
    typer.Option(metavar="P", min=0.0, max=1.0, help="Default: as generation_config says."),
]
Greedy = Annotated[bool, typer.Option("--greedy", help="Always take the most likely token.")]
Seed = Annotated[
    int | None,
    typer.Option(
        metavar="N", min=0, max=2**63 - 1, help="Of random numbers; default: another every time."
    ),
]


def run(
    model: Model,
    prompt: Annotated[
        str | None,
        typer.Option("--prompt", "-p", metavar="TEXT", help="Default: what comes through a pipe."),
    ] = None,
    system: System = None,
    raw: Annotated[
        bool,
        typer.Option("--raw", help="Go on with the prompt, even if the model has a chat template."),
    ] = False,
    backend: Backend = None,
    linears: Linears = None,
    head: Head = None,
    device: Device = None,
    threads: Threads = None,
    max_tokens: MaxTokens = 2048,
    temperature: Temperature = None,
    top_p: TopP = None,
    greedy: Greedy = False,
    seed: Seed = None,
    source: Source = None,
    json: Annotated[
        bool,
        typer.Option("--json", help="Print JSON with text, tokens, times and memory at the end."),
    ] = False,
) -> None:
    """Let a model answer a prompt.

    Text goes to stdout as it comes, and what it took to stderr. Ctrl-C ends the reply.
    """
    _refuse_unused(greedy, temperature, top_p)
    let_openmp_sleep()
    from ktk.text.prompt import read_prompt

    text = read_prompt(prompt)
    loaded = _load(model, backend, linears, head, device, threads, source)
    from ktk.text.run import run_prompt

    reply = run_prompt(
        loaded,
        text,
        _sampling(max_tokens, temperature, top_p, greedy, seed),
        system=system,
        raw=raw,
        as_json=json,
    )
    if reply.finish == "interrupted":
        raise typer.Exit(130)


def chat(
    model: Model,
    system: System = None,
    transcript: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Keep the chat in this file of JSON lines, and go on with what it has; default: a "
            "new one in the folder for state, ~/.local/state/ktk/chats.",
        ),
    ] = None,
    backend: Backend = None,
    linears: Linears = None,
    head: Head = None,
    device: Device = None,
    threads: Threads = None,
    max_tokens: MaxTokens = 2048,
    temperature: Temperature = None,
    top_p: TopP = None,
    greedy: Greedy = False,
    seed: Seed = None,
    source: Source = None,
) -> None:
    """Talk with a model, in a terminal or line by line through a pipe.

    Ctrl-C ends a reply, and leaves where nothing is being said. What was said is kept. /help lists
    what else can be typed.
    """
    _refuse_unused(greedy, temperature, top_p)
    let_openmp_sleep()
    from ktk.text.transcript import Transcript, new_path

    kept = Transcript(transcript or new_path(model), model)
    loaded = _load(model, backend, linears, head, device, threads, source)
    from ktk.text.chat import Chat

    sampling = _sampling(max_tokens, temperature, top_p, greedy, seed)
    with kept:
        Chat(loaded, sampling, kept, system).run()


def _load(
    model: str,
    backend: str | None,
    linears: str | None,
    head: str | None,
    device: str | None,
    threads: int | None,
    source: str | None,
) -> Loaded:
    from ktk.text.load import load_text_model

    return load_text_model(
        model,
        backend=backend,
        linears=linears,
        head=head,
        device=device,
        threads=threads,
        source=source,
    )


def _refuse_unused(greedy: bool, temperature: float | None, top_p: float | None) -> None:
    if greedy and (temperature or top_p is not None):
        raise typer.BadParameter(
            "--greedy takes the most likely token always: --temperature and --top-p do nothing then"
        )


def _sampling(
    max_tokens: int, temperature: float | None, top_p: float | None, greedy: bool, seed: int | None
) -> Sampling:
    from ktk.text.generate import Sampling

    return Sampling(max_tokens, temperature, top_p, greedy, seed)
