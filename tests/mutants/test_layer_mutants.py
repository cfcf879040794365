"""The kit bites in layers, too: each mutant breaks the properties that its table names."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from importlib import import_module

import pytest
from layer_mutants import EXPECTED
from run_mutants import compile_all, run_kit

from ktk.testing import LAYER


@dataclass
class Outcome:
    """The properties of a mutant that held, and those that did not."""

    held: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """Run the kit once on all mutants."""
    library = compile_all(tmp_path_factory.mktemp("mutants"))
    backends = [f"layer_mutants:{name}" for name in EXPECTED]
    options = ("-p", "layer_mutants", "--ktk-examples=12", "--ktk-no-isolation")
    found: dict[str, Outcome] = defaultdict(Outcome)
    for case in run_kit(library, LAYER, backends, *options):
        said = {one.get("name"): one.get("value", "") for one in case.iter("property")}
        if (failure := case.find("failure")) is not None:
            assert "AssertionError" in failure.get("message", ""), failure.text  # not the mutant's
            found[said["mutant"]].failed.add(said["property"])
        elif case.find("skipped") is None:
            found[said["mutant"]].held.add(said["property"])
    return found


@pytest.mark.parametrize("mutant", EXPECTED)
def test_the_kit_finds_the_fault_of_a_layer(mutant: str, outcomes: dict[str, Outcome]) -> None:
    assert outcomes[mutant].failed == EXPECTED[mutant]


def test_a_sound_backend_has_all_properties(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["sound"].held == set().union(*EXPECTED.values())


def test_every_property_of_layers_has_a_mutant() -> None:
    properties = {
        f"{module.rpartition('_')[2]}::{name}"
        for module in LAYER
        for name in vars(import_module(module))
        if name.startswith("test_")
    }
    assert {name.partition("[")[0] for name in set().union(*EXPECTED.values())} == properties
