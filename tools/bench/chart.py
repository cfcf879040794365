"""Draws the README's chart, docs/speed.svg, from recorded results.

    python tools/bench/chart.py

ktk's shares are the newest row of BF16 of that CPU in RESULTS.md that has all of the cells, those
of others are in rivals.json. A share is the time that the run's own memory and multipliers would
take at best, over the time that was measured: runs of different days can be compared by it, and not
by milliseconds.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import results

HERE = Path(__file__).parent
CHART = HERE.parents[1] / "docs/speed.svg"
#: One token is left out: memory changed its rate while the others were measured.
DECODE, PREFILL = (2, 4, 8, 16, 32), 2048
COLOURS = ("#0b6e4f", "#8a6fbf", "#c77f1b", "#4f81bd", "#999999")


def shares() -> tuple[str, dict[str, dict[int, float]]]:
    """Return what was measured where and when, and by implementation and tokens the shares."""
    recorded: dict[str, Any] = json.loads((HERE / "rivals.json").read_text())
    rows = results.section(results.TABLES.read_text(), recorded["cpu"])
    shown = {*DECODE, PREFILL}
    own = [row for row in rows if row.backend == "BF16" and shown <= row.fractions.keys()][-1]
    title = (
        f"{recorded['layer']}; {recorded['machine']}; "
        f"ktk {own.commit} of {own.date}, others of {recorded['date']}"
    )
    return title, {"ktk": own.fractions} | {
        one["name"]: {int(tokens): share for tokens, share in one["share"].items()}
        for one in recorded["rivals"]
    }


def description() -> str:
    """Return what the file says in its metadata: all that the chart shows."""
    title, found = shares()
    shown = {name: {t: share[t] for t in (*DECODE, PREFILL)} for name, share in found.items()}
    return json.dumps({"title": title, "shares": shown})


def draw(path: Path) -> None:
    """Draw both panels: few tokens, whose limit is memory, and a prompt."""
    import matplotlib as mpl

    mpl.use("agg")
    # Neither the date nor random names: the same figures make the same file.
    mpl.rcParams["svg.hashsalt"] = "ktk"
    mpl.rcParams["font.size"] = 9
    from matplotlib import pyplot

    title, found = shares()
    colours = dict(zip(found, COLOURS, strict=True))
    figure, (few, prompt) = pyplot.subplots(
        1, 2, figsize=(8, 3.2), width_ratios=(3, 2), sharey=True, layout="constrained"
    )
    for name, share in found.items():
        values = [100 * share[tokens] for tokens in DECODE]
        width = 2.4 if name == "ktk" else 1.4
        few.plot(range(len(DECODE)), values, "o-", lw=width, color=colours[name], label=name)
    few.set_xticks(range(len(DECODE)), map(str, DECODE))
    few.set(title="decode", xlabel="tokens at once", ylabel="% of the machine's limit")
    few.legend(frameon=False, ncols=2, loc="lower left", fontsize=8)
    bars = prompt.bar(
        list(found),
        [100 * share[PREFILL] for share in found.values()],
        color=[colours[name] for name in found],
    )
    prompt.bar_label(bars, fmt="%.0f")
    prompt.set(title="prefill", xlabel=f"a prompt of {PREFILL} tokens", ylim=(0, 105))
    prompt.tick_params(axis="x", labelrotation=20)
    for axes in (few, prompt):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=8)
    text = {"Date": None, "Description": description()} if path.suffix == ".svg" else None
    figure.savefig(path, metadata=text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", nargs="?", type=Path, default=CHART)
    draw(parser.parse_args().path)


if __name__ == "__main__":
    main()
