"""Convert experts for the CPU with the flags of kt-kernel's script of this name.

The work is that of `ktk convert`, which is the better way to ask for it. Some flags have no meaning
here: files depend neither on threads nor on NUMA nodes, and no GPU takes part.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

BACKENDS = {
    "int4": "AMXINT4",
    "int8": "AMXINT8",
    "awq": "AMXINT4",
    "moe_int4": "MOE_INT4",
    "moe_int8": "MOE_INT8",
}
# How the description of a checkpoint begins that holds what --input-type promises.
HOLDS = {"fp8": "e4m3", "fp16": "F16", "bf16": "BF16", "awq": "u4"}
IGNORED = {
    "threadpool_count": "files fit any number of NUMA nodes",
    "gpu": "conversion takes place on the CPU",
    "no_merge_safetensor": "there is one file per layer in any case",
    "save_backward_weights": "backward passes decode the weights of the forward pass",
    "profile": "ktk convert says how long it took",
}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the flags."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--input-path", "-i", type=Path, required=True)
    parser.add_argument("--input-type", choices=HOLDS, help="checked against what is found")
    parser.add_argument("--output", "-o", type=Path, required=True)
    parser.add_argument("--quant-method", choices=BACKENDS, default="int4")
    parser.add_argument("--cpuinfer-threads", type=int, help="default: one for each CPU")
    parser.add_argument("--threadpool-count", type=int, help="no meaning here")
    parser.add_argument("--gpu", action="store_true", help="no meaning here")
    parser.add_argument("--no-merge-safetensor", action="store_true", help="no meaning here")
    parser.add_argument(
        "--resume-layer", type=int, help="any number: finished layers are recognised by themselves"
    )
    parser.add_argument("--resume", action="store_true", help="the same, as ktk convert calls it")
    parser.add_argument("--save-backward-weights", action="store_true", help="no meaning here")
    parser.add_argument("--profile", action="store_true", help="no meaning here")
    options = parser.parse_args(arguments)
    threads = options.cpuinfer_threads
    if threads is not None and threads < 1:
        parser.error(f"--cpuinfer-threads: expected at least 1, got {threads}")
    return options


def notes(options: argparse.Namespace) -> list[str]:
    """Return what the flags do not do."""
    from ktk.checkpoint import describe

    found = []
    for name, why in IGNORED.items():
        if getattr(options, name):
            found.append(f"--{name.replace('_', '-')} has no effect: {why}")
    if options.resume_layer is not None:
        found.append("--resume-layer goes on with the layers that are not finished, whichever")
    if options.input_type:
        description = describe(options.input_path)
        if not description.dtype.startswith(HOLDS[options.input_type]):
            found.append(
                f"--input-type {options.input_type} has no effect: the experts of "
                f"{options.input_path} are stored as {description.dtype}"
            )
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the script."""
    options = parse(arguments)
    import typer

    from ktk.cli.convert import run_convert
    from ktk.errors import BackendError, CheckpointError, SettingError

    try:
        for note in notes(options):
            print(note, file=sys.stderr)
        run_convert(
            options.input_path,
            options.output,
            backend=BACKENDS[options.quant_method],
            resume=options.resume or options.resume_layer is not None,
            threads=options.cpuinfer_threads,
        )
    except typer.Exit as stop:  # interrupted, and said so
        sys.exit(stop.exit_code)
    except (BackendError, CheckpointError, SettingError) as error:
        sys.exit(f"convert_cpu_weights: {error}")


if __name__ == "__main__":
    main()
