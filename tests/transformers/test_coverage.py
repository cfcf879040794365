"""Every family of transformers is in a test of checkpoints, or stands here with the reason.

`test_registry` goes through the modules that hold experts; here it is the files: a tiny model of
each family is written and read in `test_transformers_oracle` or `test_loaded_families`, or refused
by name in `test_refused_families`. What transformers has is found (`registry`), so that a family
of next year fails until somebody adds a row.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from registry import Family, families, is_kind_of_experts
from tiny_families import FAMILIES, MODELS

from ktk.transformers.layout import is_experts

from . import test_loaded_families, test_refused_families

# Folders and classes without such a test.
EXCEPTIONS = {
    "doge": "has rows of two embeddings in the place of experts, looked up by a product of keys",
    "vitpose_backbone": "has a part of a linear layer for each data set, which its caller names",
    "AriaSharedExpertsMLP": "is computed for every token",
    "InklingSharedExperts": "is computed for every token",
}


def kinds_of(made: torch.nn.Module) -> Iterator[str]:
    """Yield the names of the classes of routed experts in a model, or in a block of experts."""
    whole = isinstance(made, transformers.PreTrainedModel)
    for module in made.modules():
        # Models have experts for every token, too, which nothing is compared with.
        if is_experts(module) if whole else is_kind_of_experts(type(module)):
            yield f"{type(module).__module__}.{type(module).__name__}"


def covered() -> dict[str, list[str]]:
    """Return the tests of each class of experts; models are built without memory."""
    rows: dict[str, Any] = {
        f"unit/test_transformers_oracle.py::{test}[{name}]": lambda one=one: one.make(64, 32)
        for test, models in (
            ("test_the_checkpoint_is_read_as_transformers_wrote_it", MODELS),
            ("test_every_family_computes_the_block_of_its_model", FAMILIES),
        )
        for name, one in models.items()
    }
    for module, test in (
        (test_loaded_families, "test_experts_are_loaded_and_computed_as_their_family_does"),
        (test_refused_families, "test_the_refusal_names_what_is_missing"),
    ):
        file = module.__name__.rpartition(".")[2]
        for name, case in module.CASES.items():
            rows[f"transformers/{file}.py::{test}[{name}]"] = case.make
    tests: dict[str, list[str]] = {}
    for test, make in rows.items():
        with torch.device("meta"):
            made = make()
        for kind in dict.fromkeys(kinds_of(made)):
            tests.setdefault(kind, []).append(f"tests/{test}")
    return tests


def without_test(found: dict[str, Family], tests: dict[str, list[str]]) -> list[str]:
    """Return the families, or their classes, that neither have a test nor are excepted."""
    missing = []
    for folder, family in found.items():
        if not family.classes:
            missing += [folder] if folder not in EXCEPTIONS else []
        for name, kind in family.classes.items():
            if f"{kind.__module__}.{name}" not in tests and name not in EXCEPTIONS:
                missing.append(f"{folder}: {name}")
    return missing


def test_every_family_has_a_test_or_a_reason() -> None:
    missing = without_test(families(), covered())
    assert not missing, (
        f"no test writes and reads a checkpoint of {', '.join(missing)}: add a row to "
        "tests/unit/tiny_families.py, or say here why not"
    )


def test_exceptions_are_of_what_exists_and_has_no_test() -> None:
    found, tests = families(), covered()
    assert len(found) > 70
    for name in EXCEPTIONS:
        kinds = [family.classes[name] for family in found.values() if name in family.classes]
        assert kinds or name in found, f"{name} is gone: take it off the list"
        assert not any(f"{kind.__module__}.{name}" in tests for kind in kinds), name
        assert name not in found or not found[name].classes, f"{name} has classes: name these"


NEXT_YEAR = {
    "by its name": (
        "import torch\nclass NextYearExperts(torch.nn.Module): pass\n",
        "",
        "nextyear: NextYearExperts",
    ),
    "by what transformers lets others compute": (
        "import torch\nfrom transformers.integrations import use_experts_implementation\n"
        "@use_experts_implementation\nclass NextYearFeedForward(torch.nn.Module): pass\n",
        "",
        "nextyear: NextYearFeedForward",
    ),
    "by its configuration": (
        "import a_package_that_is_not_installed\n",
        "from transformers import PreTrainedConfig\n"
        "class NextYearConfig(PreTrainedConfig):\n    num_routed_experts: int = 8\n",
        "nextyear",
    ),
}


@pytest.mark.parametrize("how", NEXT_YEAR)
def test_a_family_of_next_year_is_missing(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Put a folder beside those of transformers: the test above has to name it."""
    modeling, configuration, named = NEXT_YEAR[how]
    folder = tmp_path / "nextyear"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "modeling_nextyear.py").write_text(modeling)
    (folder / "configuration_nextyear.py").write_text(configuration)
    monkeypatch.setattr(transformers.models, "__path__", [str(tmp_path)])
    try:
        assert without_test(families(), {}) == [named]
    finally:
        for name in [one for one in sys.modules if ".nextyear" in one]:
            del sys.modules[name]
