"""`ktk demo`: a checkpoint through every backend that can run here, how accurate and how fast."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktk.errors import BackendError, CheckpointFormatError, CheckpointTooLarge
from ktk.terminal import doing

if TYPE_CHECKING:
    from ktk.backend import Backend
    from ktk.demo.machine import Machine
    from ktk.demo.measure import Measured, Task

_PREFILL_TOKENS = 256
_DECODE_CALLS = 32
# The float64 reference reads this many experts; with large ones that takes a while.
_CHECKED_EXPERTS = 32


def run_demo(
    *,
    checkpoint: Path | None,
    layer: int | None,
    names: Sequence[str] | None,
    as_json: bool = False,
    **reading: Any,
) -> list[Measured]:
    """Measure and print; returns what was measured.

    Parameters
    ----------
    checkpoint
        Folder or GGUF file of a model; None makes a small one in a temporary folder.
    layer
        None takes the first one that has experts.
    names
        Backends; None takes all that load.
    as_json
        Print JSON instead of a table.
    **reading
        Options of `ktk.checkpoint.open_checkpoint`.

    Raises
    ------
    ValueError
        The user has set more threads than there are CPUs.
    """
    from rich.console import Console

    import ktk
    from ktk.bench.machine import check_threads
    from ktk.checkpoint import describe
    from ktk.demo.machine import Machine
    from ktk.demo.report import print_json, print_report

    pool = ktk.default_pool()
    check_threads(pool.size)
    console = Console(stderr=as_json)
    notes = Notes()
    backends = _backends(names, notes)
    with _folder(checkpoint) as folder:
        description = describe(folder, **reading)
        number = description.layers[0] if layer is None else layer
        console.print(f"{description}; layer {number}", highlight=False, markup=False)
        machine = Machine(pool)
        with doing("computing the layer in float64"):
            task = _task(folder, number, reading)
        rows = _measure_all(task, backends, machine, pool, notes)
    if as_json:
        print_json(str(description), number, rows, notes.not_run, machine.limits())
    else:
        next_step = _next_step(checkpoint, number, rows)
        print_report(console, rows, notes.lines(), machine.limits(), next_step)
    return rows


@dataclass
class Notes:
    """Why backends, or variants of them, did not run: each reason once."""

    not_run: dict[str, list[str]] = field(default_factory=dict)

    def add(self, what: str, reason: str) -> None:
        """Note a backend, or a variant of one."""
        self.not_run.setdefault(reason, []).append(what)

    def lines(self) -> list[str]:
        """Return a line for each reason."""
        return [f"{', '.join(names)}: {reason}" for reason, names in self.not_run.items()]


@contextmanager
def _folder(checkpoint: Path | None) -> Iterator[Path]:
    if checkpoint is not None:
        yield checkpoint
        return
    from ktk.demo.model import write_checkpoint

    with tempfile.TemporaryDirectory(prefix="ktk-demo-") as name:
        with doing("writing a small Qwen3-MoE checkpoint"):
            write_checkpoint(Path(name))
        yield Path(name)


def _backends(names: Sequence[str] | None, notes: Notes) -> list[Backend]:
    """Load backends. One that was asked for must load; of the others the reason is noted."""
    import ktk

    if names is not None:
        return [ktk.load_backend(name) for name in names]
    return [backend for name in ktk.backends() if (backend := _load_or_note(name, notes))]


def _load_or_note(name: str, notes: Notes) -> Backend | None:
    import ktk

    try:
        return ktk.load_backend(name)
    except BackendError as error:
        notes.add(name, error.brief)
        return None


def _task(folder: Path, layer: int, reading: dict[str, Any]) -> Task:
    from ktk.checkpoint import open_checkpoint
    from ktk.demo.measure import Task
    from ktk.demo.routing import batches
    from ktk.testing import reference

    with open_checkpoint(folder, **reading) as opened:
        found = opened.layer(layer)
        config = found.config
        tokens = max(_CHECKED_EXPERTS // config.num_experts_per_tok, 1)
        [check] = batches(config, tokens, 1, seed=0)
        expected = reference.layer(
            check.hidden,
            check.ids,
            check.weights,
            lambda expert: reference.Expert.of(found.values(expert).arrays()),
            config.layer(),
        )
    return Task(
        path=folder,
        reading=reading,
        layer=layer,
        check=check,
        expected=expected,
        decode=batches(config, 1, _DECODE_CALLS),
        prefill=batches(config, _PREFILL_TOKENS, 2),
    )


def _measure_all(
    task: Task,
    backends: Sequence[Backend],
    machine: Machine,
    pool: Any,
    notes: Notes,
) -> list[Measured]:
    from ktk.demo.measure import measure

    rows = []
    refused: CheckpointTooLarge | None = None
    for backend in backends:
        for variant in backend.variants:
            if not variant.runnable:
                reason = f"this CPU lacks {', '.join(variant.missing_isa)}"
                notes.add(f"{backend.name} {variant.name}", reason)
                continue
            with doing(f"running {backend.name} {variant.name}"):
                machine.look(())
                try:
                    rows.append(measure(task, backend, variant.name, pool, machine))
                except CheckpointFormatError as error:
                    # Formats are the backend's: none of its variants takes what is there.
                    notes.add(backend.name, str(error))
                    break
                except CheckpointTooLarge as error:
                    notes.add(backend.name, str(error))
                    refused = error
                    break
                except (BackendError, ValueError) as error:
                    notes.add(f"{backend.name} {variant.name}", str(error))
    if refused and not rows:
        raise refused
    return rows


def _next_step(checkpoint: Path | None, layer: int, rows: Sequence[Measured]) -> str:
    if checkpoint is None:
        return (
            "ktk demo --checkpoint PATH does the same with a layer of your own model; ktk bench "
            "measures layers of well-known models."
        )
    fastest = min(rows, key=lambda row: row.decode.seconds, default=None)
    named = f', "{fastest.backend}"' if fastest else ""
    return f'in Python: moe = ktk.MoE.from_checkpoint("{checkpoint}", {layer}{named})'
