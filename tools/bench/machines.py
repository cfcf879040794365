"""Says what a divided layer would take on several machines, from what `distributed.py` measured.

    python tools/bench/distributed.py --json measured.json
    python tools/bench/machines.py measured.json [--speed 16]

A model on paper. `docs/distributed.md` has its formulas, and its table.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from typing import Any

import numpy as np

EXPERTS, TOP_K, HIDDEN = 128, 8, 2048
MACHINES = (2, 4, 8, 16)
GBIT = (10, 100, 400)
# Between two machines of a rack, one way.
LATENCY = 50e-6
TOKEN = 2 * HIDDEN + 8 * TOP_K  # bf16, ids and weights
SUMS = 4 * HIDDEN
_TRIALS = 200


@dataclass(frozen=True)
class Parts:
    """Seconds, as they were measured.

    Attributes
    ----------
    expert
        To read one expert.
    row
        To compute one token of one expert, beside that.
    call, token
        What dividing costs beside computing: each call, and each token of one.
    """

    expert: float
    row: float
    call: float
    token: float

    @classmethod
    def of(cls, rows: list[dict[str, Any]], speed: float) -> Parts:
        """Take the parts from measurements with as many experts of each token on each rank.

        Raises ValueError where measurements are too few, or make no sense together.
        """
        even = {row["tokens"]: row for row in rows if row["even"]}
        if len(even) < 2:
            raise ValueError(
                f"{len(even)} numbers of tokens were measured with as many experts of each token"
                " on each rank (even), and two are needed: distributed.py --tokens 1 1024"
            )
        few, many = even[min(even)], even[max(even)]
        expert = few["one"] / (TOP_K * few["tokens"])
        row = (many["one"] - EXPERTS * expert) / (TOP_K * many["tokens"])
        if not (expert > 0 and row > 0):
            raise ValueError(
                f"{many['tokens']} tokens took {many['one'] * 1e3:.3g} ms, and reading all experts"
                f" would take {EXPERTS * expert * 1e3:.3g} ms, by {few['tokens']} tokens: measure"
                " on an idle machine, with one token and with many (distributed.py --tokens 1 1024)"
            )
        call = max(0.0, few["split"] - few["one"])
        token = max(0.0, many["split"] - many["one"] - call) / many["tokens"]
        return cls(expert / speed, row / speed, call, token / speed)


def slowest(parts: Parts, tokens: int, machines: int) -> float:
    """Return the seconds of the rank with the most to do, the mean over random routing."""
    random = np.random.default_rng(0)
    took = []
    for _ in range(_TRIALS if tokens < 256 else 5):
        drawn = np.argpartition(random.random((tokens, EXPERTS)), TOP_K, axis=1)[:, :TOP_K]
        rows = np.bincount(drawn.ravel(), minlength=EXPERTS).reshape(machines, -1)
        each = (rows > 0).sum(1) * parts.expert + rows.sum(1) * parts.row
        took.append(each.max())
    return float(np.mean(took))


def others(machines: int) -> float:
    """Return how many other ranks a token goes to, on average: one of a rank in `machines`."""
    mine = EXPERTS // machines
    none = np.prod([(EXPERTS - mine - i) / (EXPERTS - i) for i in range(TOP_K)])
    return float((machines - 1) * (1 - none))


def seconds(parts: Parts, tokens: int, machines: int, gbit: float) -> float:
    """Return the time of a layer, nothing overlapped."""
    rate = gbit * 1e9 / 8
    here = tokens / min(tokens, machines)  # tokens of a rank that has some
    sent = here * others(machines)
    wire = sent * (TOKEN + SUMS) / rate + 2 * LATENCY
    return slowest(parts, tokens, machines) + parts.call + here * parts.token + wire


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("measured", help="what `distributed.py --json` wrote")
    parser.add_argument("--speed", type=float, default=1.0, help="of a machine, against this one")
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 64, 1024])
    options = parser.parse_args()
    if not options.speed > 0:
        parser.error(f"--speed {options.speed:g}: it must be above 0")
    if min(options.tokens, default=1) < 1:
        parser.error(f"--tokens {min(options.tokens)}: it must be at least 1")
    try:
        with open(options.measured) as file:
            parts = Parts.of(json.load(file), options.speed)
    except OSError as error:
        parser.error(str(error))
    except ValueError as error:
        parser.error(f"{options.measured}: {error}")
    except (KeyError, TypeError):
        parser.error(f"{options.measured} is not what distributed.py --json writes")
    print(
        f"expert {parts.expert * 1e6:.1f} us, row {parts.row * 1e6:.2f} us, call "
        f"{parts.call * 1e6:.0f} us, token {parts.token * 1e6:.2f} us"
    )
    print("| tokens | machines | 1 machine, ms | " + " | ".join(f"{g} Gbit/s" for g in GBIT) + " |")
    print("|---|---|---|" + "---|" * len(GBIT))
    for tokens in options.tokens:
        one = slowest(parts, tokens, 1)
        for machines in MACHINES:
            took = [seconds(parts, tokens, machines, gbit) for gbit in GBIT]
            cells = " | ".join(f"{t * 1e3:.2f} ({one / t:.1f} x)" for t in took)
            print(f"| {tokens} | {machines} | {one * 1e3:.2f} | {cells} |")


if __name__ == "__main__":
    main()
