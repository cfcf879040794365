"""The kit bites in layers, too: each mutant breaks the properties that its table names."""

from __future__ import annotations

from collections import defaultdict
from importlib import import_module

import pytest
from layer_mutants import EXPECTED
from run_mutants import compile_all, run_kit

from ktk.testing import LAYER


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Return the properties that each mutant broke."""
    library = compile_all(tmp_path_factory.mktemp("mutants"))
    backends = [f"layer_mutants:{name}" for name in EXPECTED]
    options = ("-p", "layer_mutants", "--ktk-examples=12", "--ktk-no-isolation")
    found: dict[str, set[str]] = defaultdict(set)
    for case in run_kit(library, LAYER, backends, *options):
        said = {one.get("name"): one.get("value", "") for one in case.iter("property")}
        if (failure := case.find("failure")) is not None:
            assert "AssertionError" in failure.get("message", ""), failure.text  # not the mutant's
            found[said["mutant"]].add(said["property"])
    return found


@pytest.mark.parametrize("mutant", EXPECTED)
def test_the_kit_finds_the_fault_of_a_layer(mutant: str, failed: dict[str, set[str]]) -> None:
    assert failed[mutant] == EXPECTED[mutant]


def test_every_property_of_layers_has_a_mutant() -> None:
    properties = {
        f"{module.rpartition('_')[2]}::{name}"
        for module in LAYER
        for name in vars(import_module(module))
        if name.startswith("test_")
    }
    assert {name.partition("[")[0] for name in set().union(*EXPECTED.values())} == properties
