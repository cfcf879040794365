"""The kit bites: each mutant breaks one property, and the kit reports that one and no other."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import defaultdict
from pathlib import Path

import pytest

import ktk
from ktk.testing import conformance

HERE = Path(__file__).parent
EXPECTED = {
    "sound": None,
    "least_squares": None,
    "keeps_blocks": None,
    "one_scale_per_row": "test_weights_keep_the_precision_of_their_format",
    "truncates_weights": "test_weights_keep_the_precision_of_their_format",
    "flushes_subnormals": "test_weights_that_are_stored_as_given_keep_their_bits",
    "swaps_nibbles": "test_weights_that_are_stored_as_given_keep_their_bits",
    "packs_one_row_more": "test_packing_a_range_writes_only_its_rows",
    "unpacks_from_row_zero": "test_unpacking_a_range_is_a_part_of_unpacking_all",
    "exports_one_column_less": "test_exported_weights_are_the_same_when_packed_again",
    "stores_negated": "test_variants_of_one_layout_read_each_others_weights",
    "truncates_acts": "test_activations_keep_the_precision_of_their_format",
    "packs_acts_at_zero": "test_activations_may_be_packed_in_parts",
    "acts_of_their_own": "test_activations_depend_on_their_format_only",
    "drops_odd_depth": "test_products_are_as_exact_as_float32",
    "depends_on_batch": "test_rows_are_independent_of_their_batch",
    "kernels_disagree": "test_micro_kernels_agree",
    "ignores_n_begin": "test_columns_may_be_cut_anywhere",
    "writes_outside": "test_nothing_outside_the_range_is_touched",
    "reads_padding": "test_padding_rows_may_hold_anything",
    "leaks_nan": "test_nan_and_infinity_stay_in_their_row",
    "loses_nan": "test_nan_is_not_lost",
    "loses_nan_weights": "test_nan_weights_stay_in_their_columns",
    "rounds_ties_away": "test_variants_agree",
}
CFLAGS = (
    "-std=gnu11 -O2 -ffp-contract=off -Wall -Wextra -Werror -Wno-override-init"
    " -Wno-missing-field-initializers -fPIC -shared"
)


@pytest.fixture(scope="module")
def broken_properties(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Run the kit once on all of them: mutant -> properties that failed."""
    folder = tmp_path_factory.mktemp("mutants")
    library, report = folder / "libmutants.so", folder / "report.xml"
    include = ["-isystem", ktk.get_include()]
    sources = sorted(HERE.glob("*.c"))
    compile_command = ["cc", *CFLAGS.split(), *include, *sources, "-o", library, "-lm"]
    subprocess.run(compile_command, check=True)

    names = [f"mutants:{name}" for name in EXPECTED]
    options = [
        "--ktk-no-shrink",
        "--ktk-profile=ci",
        "--ktk-examples=60",
        "-q",
        "-pno:cacheprovider",
    ]
    chosen = [part for name in names for part in ("--ktk-backend", name)]
    kit = [
        "-p",
        "ktk.testing.plugin",
        "--pyargs",
        "ktk.testing.conformance",
        "-p",
        "no:cacheprovider",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *kit, *chosen, *options, f"--junitxml={report}"],
        env=os.environ | {"KTK_MUTANTS": str(library), "PYTHONPATH": str(HERE)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 1, done.stdout[-4000:] + done.stderr[-2000:]
    failed = defaultdict(set)
    for case in ET.parse(report).getroot().iter("testcase"):
        assert case.find("error") is None, ET.tostring(case)
        if case.find("failure") is not None:
            name, _, parameter = case.get("name", "").partition("[")
            failed[parameter.partition("-")[0]].add(name)
    return failed


@pytest.mark.parametrize("mutant", EXPECTED)
def test_the_kit_finds_exactly_the_fault(
    mutant: str, broken_properties: dict[str, set[str]]
) -> None:
    expected = EXPECTED[mutant]
    assert broken_properties.get(mutant, set()) == ({expected} if expected else set())


def test_every_property_has_a_mutant() -> None:
    properties = {
        name for name, _ in inspect.getmembers(conformance, callable) if name.startswith("test_")
    }
    assert properties == {name for name in EXPECTED.values() if name}
