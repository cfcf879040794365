"""Measure how this CPU wants weights fetched, and print a row for native/core/prefetch.cc.

python tools/bench/prefetch            # ten minutes with two threads
python tools/bench/prefetch --quick    # three, and less sure
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import ktk
from ktk import _core
from ktk.bench.limits import LimitProbe
from ktk.bench.machine import check_threads
from ktk.errors import BackendError
from prefetch.cases import Case, cases_of, choose_variants, dealing_cases, either_cases
from prefetch.choose import (
    Verdict,
    choose_accumulators,
    choose_decode,
    choose_few,
    choose_in_order,
    decide,
    rank,
    verdict,
)
from prefetch.policy import ALL_IN_ORDER, CLASSES, Fetch, Policy, candidates, is_done
from prefetch.row import instruction_sets, row
from prefetch.timing import FULL, QUICK, Clock, Duels, Effort, Layers, duel, survey

BACKENDS = ("BF16", "AMXINT8", "FP8")
EITHER = ("MXFP4", "FP8")  # backends whose weights are decoded once or by every tile
FINALISTS = 3
#: Four and five cycles for a product, two of which begin in a cycle.
ACCUMULATORS_TRIED = (8, 10)


def variants_here(name: str) -> list[_core.VariantInfo]:
    """Return the variants of a backend, the one that runs by default first."""
    backend = ktk.load_backend(name)
    default = backend.core.default_variant()
    return sorted(backend.variants, key=lambda variant: variant.name != default)


class Machine:
    """The layers of the backends that run here, with the clocks of their cases."""

    def __init__(self, backends: Iterable[str], threads: int, effort: Effort) -> None:
        check_threads(threads)
        self.pool = ktk.WorkerPool(threads)
        self.effort = effort
        self.present = Policy.parse(_core.prefetch())
        self.cases: list[Case] = []
        self._surveyed: dict[Case, dict[Fetch, float]] = {}
        for name in backends:
            variants = choose_variants(name, variants_here(name))
            self.cases += [case for variant in variants for case in cases_of(name, variant)]
        self.layers = cache(lambda backend, variant: Layers(backend, variant, self.pool))

    def clock(self, case: Case) -> Clock:
        """Return a clock for the calls of a case."""
        layers = self.layers(case.backend, case.variant)
        return Clock(layers.caller(case.rows), self.effort.seconds)

    def survey(self, case: Case) -> dict[Fetch, float]:
        """Return the relative times of all candidates."""
        if case not in self._surveyed:
            say(f"surveying {case}")
            tried = candidates(amx="amx" in case.variant, l1_ahead=self.present.l1_ahead)
            settings = {fetch: setting(case, fetch) for fetch in tried}
            rounds = self.effort.survey_rounds
            self._surveyed[case] = survey(self.clock(case), settings, rounds)
        return self._surveyed[case]

    def settle(self, name: str, cases: list[Case], *, moved: bool) -> Verdict:
        """Let the best candidates of a class meet the present policy."""
        present: Fetch = getattr(self.present, name)
        surveyed = [self.survey(case) for case in cases]
        common = set.intersection(*(set(times) for times in surveyed))
        amx = any("amx" in case.variant for case in cases)
        common = {fetch for fetch in common if is_done(name, fetch, amx=amx)}
        ranked = rank([{f: t for f, t in times.items() if f in common} for times in surveyed])
        # Where the class has grown, its entry is new to some of its cases.
        finalists = [fetch for fetch in ranked if moved or fetch != present][:FINALISTS]
        ratios: dict[Fetch, dict[str, list[float]]] = {fetch: {} for fetch in finalists}
        itself: dict[str, list[float]] = {}
        for case in cases:
            say(f"{name}: comparing {', '.join(map(str, finalists))} in {case}")
            settings = ["", *(setting(case, fetch) for fetch in finalists)]
            found = duel(self.clock(case), settings, self.effort.duel_rounds)
            itself[str(case)], *others = found.ratios
            for fetch, ratio in zip(finalists, others, strict=True):
                ratios[fetch][str(case)] = ratio
            say(f"    now {self.rate(case, found)}, others used {found.others:.0%} of the CPUs")
        return verdict(present, ratios, itself)

    def order(self, cases: list[Case]) -> int:
        """Return up to how many products weights are best used in the order of memory."""
        ratios: dict[int, list[tuple[float, float]]] = {}
        for case in cases:
            times = self.never_and_always(case, "in_order_products", ALL_IN_ORDER)
            ratios.setdefault(case.products, []).append(times)
        return choose_in_order(ratios, self.present.in_order_products)

    def decode_rows(self) -> int:
        """Return from how many rows on weights are best decoded once; 0: never."""
        ratios: dict[int, list[tuple[float, float]]] = {}
        for name in EITHER:
            for case in either_cases(name, variants_here(name)):
                times = self.never_and_always(case, "decode_rows", 1)
                ratios.setdefault(case.rows, []).append(times)
        return choose_decode(ratios, self.present.decode_rows)

    def accumulators(self) -> int:
        """Return how many sums keep the multiplier busy, by tiles of rows with more and less."""
        ratios = {number: list[float]() for number in ACCUMULATORS_TRIED}
        for name in BACKENDS:
            for case in dealing_cases(name, variants_here(name)):
                for number, time in self.times(case, "accumulators", ACCUMULATORS_TRIED).items():
                    ratios[number].append(time)
        return choose_accumulators(ratios, self.present.accumulators)

    def never_and_always(self, case: Case, number: str, always: int) -> tuple[float, float]:
        """Return the relative times with 0 and with `always` as a number of the policy."""
        times = self.times(case, number, (0, always))
        return times[0], times[always]

    def times(self, case: Case, name: str, numbers: Sequence[int]) -> dict[int, float]:
        """Return the times with each of some numbers of the policy, relative to the present."""
        say(f"{name}: comparing in {case}")
        settings = [f"{name}={number}" for number in numbers]
        found = duel(self.clock(case), settings, self.effort.duel_rounds)
        times = dict(zip(numbers, map(statistics.median, found.ratios), strict=True))
        say("    " + ", ".join(f"{n} {time:.3f}" for n, time in times.items()) + " of the present")
        return times

    def rate(self, case: Case, found: Duels) -> str:
        """Return the weights read in a second by the present policy, its fastest sample."""
        hit = self.layers(case.backend, case.variant).layers[0].config.num_experts_per_tok
        nbytes = hit * self.layers(case.backend, case.variant).expert_bytes
        return f"{nbytes / min(found.seconds) / 1e9:.1f} GB/s"


def setting(case: Case, fetch: Fetch) -> str:
    """Return the KTK_PREFETCH that gives a candidate to the class of a case."""
    names = ("few", "one") if case.kind == "single" else (case.kind,)
    return ",".join(f"{name}={fetch}" for name in names)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def measure(machine: Machine, wanted: Iterable[str]) -> tuple[dict[str, Verdict], Policy]:
    """Return the verdicts of classes, and the policy that they make."""
    single = [case for case in machine.cases if case.kind == "single"]
    present = machine.present.few_products
    few_products = present
    if {"few", "one"} <= set(wanted) and single:
        by_products: dict[int, list[Mapping[Fetch, float]]] = {}
        for case in single:
            by_products.setdefault(case.products, []).append(machine.survey(case))
        few_products = choose_few(by_products, present)
    groups = {name: [case for case in machine.cases if case.kind == name] for name in wanted}
    groups["few"] = [case for case in single if case.products <= few_products]
    groups["one"] = [case for case in single if case.products > few_products]
    moved = few_products != present
    verdicts = {
        name: machine.settle(name, groups[name], moved=moved and name in ("few", "one"))
        for name in wanted
        if groups[name]
    }
    chosen = decide(machine.present, verdicts, few_products)
    if {"few", "one"} <= set(wanted):
        chosen = replace(chosen, in_order_products=machine.order(single))
    if "pair" in wanted:
        chosen = replace(chosen, accumulators=machine.accumulators())
    if "decode" in wanted:
        chosen = replace(chosen, decode_rows=machine.decode_rows())
    return verdicts, chosen


def report(machine: Machine, verdicts: Mapping[str, Verdict], chosen: Policy) -> None:
    """Print what was found, then the row."""
    for name, found in verdicts.items():
        print(
            f"{name}: {found.present} now, {found.best} takes {found.ratio} of its time; ", end=""
        )
        print("better" if found.is_better else "no more than noise, or too little: kept")
        print(f"    noise: the present policy takes {found.noise} of its own time")
        for case, ratio in found.by_case.items():
            print(f"    {case}: {ratio}")
    for name in CLASSES:
        if name not in verdicts:
            print(f"{name}: not measured, {getattr(machine.present, name)} kept")
    comment = [
        f"{_core.cpu_model()}, {machine.pool.size} threads. Time, relative to that with",
        f"{machine.present}:",
        *(
            f"{name} {found.ratio} at {found.best}"
            for name, found in verdicts.items()
            if getattr(chosen, name) == found.best
        ),
    ]
    if chosen == machine.present:
        print("\nNothing to change on this CPU:")
    isa = instruction_sets(_core.allowed_isa())
    print(f"\nA row for native/core/prefetch.cc:\n\n{row(chosen, _core.cpu_id(), isa, comment)}")
    print(f"\nThe same for trials:\n\nexport KTK_PREFETCH={chosen}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer and shorter turns")
    parser.add_argument("--threads", type=int, default=0, help="workers; 0: all physical cores")
    parser.add_argument("--backends", default=",".join(BACKENDS), help="default: %(default)s")
    parser.add_argument("--classes", default=",".join(CLASSES), help="default: %(default)s")
    arguments = parser.parse_args()
    wanted = arguments.classes.split(",")
    if unknown := set(wanted) - set(CLASSES):
        parser.error(f"no class {', '.join(sorted(unknown))}; there are {', '.join(CLASSES)}")
    try:
        machine = Machine(
            arguments.backends.split(","), arguments.threads, QUICK if arguments.quick else FULL
        )
        probe = LimitProbe(machine.pool.size, cpus=[cpu for cpu in machine.pool.cpus if cpu >= 0])
        print(f"{_core.cpu_model()}, {_core.cpu_id()}, {machine.pool.size} threads")
        print(f"memory is read at {probe.read(0.5) / 1e9:.1f} GB/s; policy now: {machine.present}")
        del probe
        verdicts, chosen = measure(machine, wanted)
    except (BackendError, ValueError, OSError, MemoryError) as error:
        say(f"prefetch: {error}")
        return 1
    report(machine, verdicts, chosen)
    return 0


if __name__ == "__main__":
    sys.exit(main())
