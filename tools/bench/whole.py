"""Times one model in several ways, each in its own process: transformers, ktk, llama.cpp.

    python tools/bench/whole.py OUT/bf16 --gguf OUT/q4_k_m.gguf --llama-bench bin/llama-bench
    python tools/bench/whole.py OUT/bf16 --way eager --way AMXINT8

The model may be any; `make_model.py` writes one. Ways of the folder are `eager` and `grouped_mm`,
transformers' own experts, and backends of ktk, with all other matrices as `ktk run` has them. Of
the file they are LLAMAFILE and llama.cpp. All take turns, so that no way has the machine's slow
minutes alone; a line has the median of the turns, and the best one in brackets.

Tokens per second of a prompt of --prompt tokens, and of the 32 tokens behind it, one at a time;
seconds of loading, and the largest resident memory while loading. For transformers that includes
pages of the files, which are mapped; llama.cpp's loading is not timed.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

import ktk

STOCK = ("eager", "grouped_mm")
LLAMA, LLAMAFILE = "llama.cpp", "LLAMAFILE"
REPLY = 32  # tokens, as many as ktk.bench.whole times


def stock(folder: str, way: str, threads: int) -> Any:
    """Load a model as transformers does by itself."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from ktk.text.load import Loaded

    torch.set_num_threads(threads)
    began = time.perf_counter()
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", experts_implementation=way
    )
    seconds = time.perf_counter() - began
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return Loaded(folder, Path(folder), model.eval(), tokenizer, (), threads, "cpu", seconds)


def one(model: str, way: str, threads: int, prompt: int) -> dict[str, float]:
    """Load a model in one way in this process, and time it once."""
    from ktk.bench.whole import measure
    from ktk.text.load import load_text_model

    if way in STOCK:
        loaded = stock(model, way, threads)
    else:
        backend = None if way == LLAMAFILE else way
        loaded = load_text_model(model, backend=backend, threads=threads)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    prefill, decode = measure(loaded, [prompt], 1, lambda _: None)
    return {
        "prefill": prefill.tokens_per_second,
        "decode": decode.tokens_per_second,
        "load": loaded.seconds,
        "peak": peak,
    }


def llama(program: str, file: str, threads: int, prompt: int) -> dict[str, float]:
    """Time llama.cpp, whose tokens come behind a prompt of the same length."""
    command = [program, "-m", file, "-t", threads, "-r", 1, "-o", "json"]
    found = {}
    for name, options in (
        ("prefill", ["-p", prompt, "-n", 0]),
        ("decode", ["-p", 0, "-n", REPLY, "-d", prompt]),
    ):
        done = subprocess.run(
            list(map(str, [*command, *options])), capture_output=True, text=True, check=True
        )
        (record,) = json.loads(done.stdout)
        found[name] = float(record["avg_ts"])
    return found


def apart(model: str, way: str, options: argparse.Namespace) -> dict[str, float]:
    """Run `one` in a process of its own, whose memory nobody else has used."""
    command = [sys.executable, __file__, model, "--one", way]
    command += ["--threads", str(options.threads), "--prompt", str(options.prompt)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def table(turns: dict[str, list[dict[str, float]]]) -> str:
    """Return the figures of all ways."""
    lines = [f"{'':12}{'prefill/s':>16}{'decode/s':>16}{'load s':>10}{'peak GiB':>10}"]
    for way, found in turns.items():
        line = f"{way:12}"
        for name in ("prefill", "decode"):
            values = [one[name] for one in found]
            line += f"{statistics.median(values):8.1f} ({max(values):.1f})".rjust(16)
        for name in ("load", "peak"):
            known = [one[name] for one in found if name in one]
            line += f"{statistics.median(known):10.1f}" if known else f"{'-':>10}"
        lines.append(line)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time one model in several ways.")
    parser.add_argument("model", help="folder of a checkpoint in bf16")
    parser.add_argument("--gguf", help="the same model as GGUF file")
    parser.add_argument("--llama-bench", metavar="PROGRAM", help="of llama.cpp, for the GGUF file")
    ways = [*STOCK, "BF16", "AMXINT8", "AMXINT4"]
    parser.add_argument("--way", action="append", help=f"of the folder; by default {ways}")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    for name in ("threads", "prompt", "turns"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: it must be at least 1")
    if options.one:
        print(json.dumps(one(options.model, options.one, options.threads, options.prompt)))
        return
    if options.llama_bench and not options.gguf:
        parser.error("--llama-bench needs --gguf")
    for way in set(options.way or ways) - set(STOCK):
        ktk.load_backend(way)  # now, not after the turns of others
    turns: dict[str, list[dict[str, float]]] = {way: [] for way in options.way or ways}
    if options.gguf:
        turns[LLAMAFILE] = []
    if options.gguf and options.llama_bench:
        turns[LLAMA] = []
    for turn in range(options.turns):
        for way, found in turns.items():
            print(f"turn {turn + 1} of {options.turns}: {way}", file=sys.stderr)
            if way == LLAMA:
                found.append(
                    llama(options.llama_bench, options.gguf, options.threads, options.prompt)
                )
            else:
                found.append(
                    apart(options.gguf if way == LLAMAFILE else options.model, way, options)
                )
    print(table(turns))


if __name__ == "__main__":
    main()
