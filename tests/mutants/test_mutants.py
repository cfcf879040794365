"""The kit bites: each mutant breaks a property, and the kit reports that one and no other."""

from __future__ import annotations

import dataclasses
import platform
from collections import defaultdict
from collections.abc import Collection
from importlib import import_module
from pathlib import Path

import pytest
from run_mutants import compile_all, run_kit

from ktk import _core
from ktk.testing import BACKEND

PROPERTIES = {
    name for module in BACKEND for name in vars(import_module(module)) if name.startswith("test_")
}
MEMORY = "test_memory_is_as_large_as_the_table_says"
EVERY_OPERAND = {f"{MEMORY}[{operand}]" for operand in _core.PackedMatrix.GUARDS}
#: Properties that look at weights as they are stored or exported, or at stored activations.
WHAT_UNPACKS = {
    "test_weights_keep_the_precision_of_their_format",
    "test_weights_that_are_stored_as_given_keep_their_bits",
    "test_unpacking_a_range_is_a_part_of_unpacking_all",
    "test_exported_weights_are_the_same_when_packed_again",
    "test_products_are_as_exact_as_float32",
    "test_nan_weights_stay_in_their_columns",
    "test_infinite_weights_stay_in_their_columns",
    "test_a_matrix_may_be_packed_again",
}
WHAT_EXPORTS = {
    "test_exported_weights_are_the_same_when_packed_again",
    "test_exporting_a_range_is_a_part_of_exporting_all",
}
WHAT_DECODES = {
    "test_activations_keep_the_precision_of_their_format",
    "test_activations_may_be_packed_in_parts",
    "test_products_are_as_exact_as_float32",
}
EXPECTED: dict[str, set[str]] = {
    "sound": set(),
    "sized": set(),
    "least_squares": set(),
    "keeps_blocks": set(),
    "scaled": set(),
    "one_scale_per_row": {"test_weights_keep_the_precision_of_their_format"},
    "truncates_weights": {"test_weights_keep_the_precision_of_their_format"},
    "flushes_subnormals": {"test_weights_that_are_stored_as_given_keep_their_bits"},
    "flushes_scales": {"test_weights_that_are_stored_as_given_keep_their_bits"},
    "takes_scales_absolute": {
        "test_weights_keep_the_precision_of_their_format",
        "test_weights_that_are_stored_as_given_keep_their_bits",
    },
    "reads_no_scale_as_one": {
        "test_weights_keep_the_precision_of_their_format",
        "test_weights_that_are_stored_as_given_keep_their_bits",
    },
    "swaps_nibbles": {"test_weights_that_are_stored_as_given_keep_their_bits"},
    "ignores_data_stride": {"test_rows_of_a_source_may_lie_apart"},
    "ignores_scale_stride": {"test_rows_of_a_source_may_lie_apart"},
    "ignores_zero_stride": {"test_rows_of_a_source_may_lie_apart"},
    "packs_one_row_more": {"test_packing_a_range_writes_only_its_rows"},
    "leaves_padding": {"test_packing_writes_every_byte"},
    "unpacks_from_row_zero": {"test_unpacking_a_range_is_a_part_of_unpacking_all"},
    "unpacks_tight": WHAT_UNPACKS | EVERY_OPERAND,
    "exports_from_row_zero": {"test_exporting_a_range_is_a_part_of_exporting_all"},
    "exports_tight": {"test_exporting_a_range_is_a_part_of_exporting_all"},
    "exports_one_row_more": {"test_exporting_a_range_is_a_part_of_exporting_all"},
    "exports_one_row_before": {"test_exporting_a_range_is_a_part_of_exporting_all"},
    "exports_behind_rows": {"test_exporting_a_range_is_a_part_of_exporting_all"},
    "exports_one_column_less": {"test_exported_weights_are_the_same_when_packed_again"},
    "believes_any_bytes": {"test_packed_bytes_are_told_from_others"},
    "stores_negated": {"test_variants_of_one_layout_read_each_others_weights"},
    "decodes_tight": WHAT_DECODES | EVERY_OPERAND,
    "truncates_acts": {"test_activations_keep_the_precision_of_their_format"},
    "packs_acts_at_zero": {"test_activations_may_be_packed_in_parts"} | EVERY_OPERAND,
    "acts_of_their_own": {"test_activations_depend_on_their_format_only"},
    "drops_odd_depth": {"test_products_are_as_exact_as_float32"},
    "depends_on_batch": {"test_rows_are_independent_of_their_batch"},
    "kernels_disagree": {"test_micro_kernels_agree"},
    "ignores_n_begin": {"test_columns_may_be_cut_anywhere"},
    "writes_outside": {"test_nothing_outside_the_range_is_touched", f"{MEMORY}[dst]"},
    "reads_padding": {"test_padding_rows_may_hold_anything", f"{MEMORY}[act]"},
    "leaks_nan": {"test_nan_and_infinity_stay_in_their_row"},
    "loses_nan": {"test_nan_is_not_lost"},
    "loses_later_nan": {"test_nan_is_not_lost"},
    "loses_nan_weights": {
        "test_nan_weights_stay_in_their_columns",
        "test_infinite_weights_stay_in_their_columns",
    },
    "saturates_infinity": {"test_infinite_weights_stay_in_their_columns"},
    "remembers_weights": {"test_a_matrix_may_be_packed_again"},
    "keeps_old_rows": {"test_a_matrix_may_be_packed_again"},
    "rounds_ties_away": {"test_variants_agree"},
}


@dataclasses.dataclass(frozen=True)
class Lie:
    """What the kit says about a backend that does not return, or takes more memory than it says."""

    properties: set[str]
    words: str
    others: set[str] = dataclasses.field(default_factory=set)  #: that may fail, too


LIARS = {
    "throws_in_pack": Lie(
        {"test_packing_a_range_writes_only_its_rows", "test_packing_writes_every_byte"},
        "a backend threw a C++ exception",
        EVERY_OPERAND,
    ),
    "throws_in_run": Lie(
        {
            "test_columns_may_be_cut_anywhere",
            "test_nothing_outside_the_range_is_touched",
            "test_registers_of_the_caller_are_kept",
        },
        "a backend threw a C++ exception",
        EVERY_OPERAND,
    ),
    "never_returns": Lie(
        {"test_unpacking_a_range_is_a_part_of_unpacking_all"},
        "An example took longer than 3 s",
        EVERY_OPERAND,
    ),
    "crashes": Lie(WHAT_EXPORTS, "SIGSEGV: ", EVERY_OPERAND),
    "aborts": Lie(WHAT_EXPORTS, "SIGABRT: ", EVERY_OPERAND),
    "weight_size_short": Lie({f"{MEMORY}[weight]"}, "SIGSEGV: "),
    "source_size_short": Lie({f"{MEMORY}[weight]"}, "SIGSEGV: "),
    "packs_before_weights": Lie({f"{MEMORY}[weight]"}, "pack_weight wrote byte 1 before the"),
    "act_size_short": Lie({f"{MEMORY}[act]"}, "SIGSEGV: ", PROPERTIES | EVERY_OPERAND),
    "packs_behind_acts": Lie({f"{MEMORY}[act]"}, "SIGSEGV: "),
    "scratch_size_short": Lie({f"{MEMORY}[scratch]"}, "SIGSEGV: "),
    "runs_behind_dst": Lie({f"{MEMORY}[dst]"}, "SIGSEGV: "),
    "loses_registers": Lie(
        {"test_registers_of_the_caller_are_kept"},
        "mxcsr" if platform.machine() == "x86_64" else "fpcr",
        PROPERTIES | EVERY_OPERAND,
    ),
    "wants_more_alignment": Lie(
        {"test_products_are_as_exact_as_float32"}, "SIGABRT: ", PROPERTIES | EVERY_OPERAND
    ),
    "adds_to_dst": Lie({f"{MEMORY}[dst]"}, "nan"),
    "reads_behind_source": Lie({f"{MEMORY}[input]"}, "SIGSEGV: "),
    "unpacks_behind_out": Lie({f"{MEMORY}[output]"}, "SIGSEGV: "),
}


@dataclasses.dataclass
class Outcome:
    """What the kit said about a mutant: all properties, and the texts of those that failed."""

    properties: set[str] = dataclasses.field(default_factory=set)
    failed: dict[str, str] = dataclasses.field(default_factory=dict)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_all(tmp_path_factory.mktemp("mutants"))


def outcomes(library: Path, mutants: Collection[str], *options: str) -> dict[str, Outcome]:
    """Run the kit once on several mutants."""
    found: dict[str, Outcome] = defaultdict(Outcome)
    for case in run_kit(library, BACKEND, [f"mutants:{name}" for name in mutants], *options):
        name, _, parameter = case.get("name", "").partition("[")
        outcome = found[parameter.partition("-")[0]]
        outcome.properties.add(name)
        operand = parameter.removesuffix("]").rpartition("-")[2]
        name = f"{name}[{operand}]" if operand in _core.PackedMatrix.GUARDS else name
        if (failure := case.find("failure")) is not None:
            outcome.failed[name] = f"{failure.get('message')}\n{failure.text}"
    return found


@pytest.fixture(scope="module")
def mutants(library: Path) -> dict[str, Outcome]:
    return outcomes(library, EXPECTED, "--ktk-examples=16", "--ktk-no-isolation")


@pytest.fixture(scope="module")
def liars(library: Path) -> dict[str, Outcome]:
    return outcomes(library, LIARS, "--ktk-examples=12", "--ktk-time-limit=3")


@pytest.mark.parametrize("mutant", EXPECTED)
def test_the_kit_finds_exactly_the_fault(mutant: str, mutants: dict[str, Outcome]) -> None:
    assert set(mutants[mutant].failed) == EXPECTED[mutant]


@pytest.mark.parametrize("mutant", LIARS)
def test_a_liar_ends_one_property_and_not_the_kit(mutant: str, liars: dict[str, Outcome]) -> None:
    lie, outcome = LIARS[mutant], liars[mutant]
    assert lie.properties <= set(outcome.failed)
    assert set(outcome.failed) <= lie.properties | lie.others
    for name in lie.properties:
        assert lie.words in outcome.failed[name]
        assert "Draw 1: " in outcome.failed[name]  # the example
    assert outcome.properties == PROPERTIES


def test_every_property_has_a_mutant() -> None:
    found = set[str]().union(*EXPECTED.values(), *(lie.properties for lie in LIARS.values()))
    assert {name.partition("[")[0] for name in found} == PROPERTIES
