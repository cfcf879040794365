"""Every backend that ktk comes with passes the kit, in every variant that can run here."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import ktk
from ktk.errors import BackendUnsupported
from ktk.testing import BACKEND, LAYER, plugin

NAMES = [info.name for info in ktk.backends().values() if info.distribution == "ktk" and info.built]
# A whole layer takes longer than a product, so its properties get fewer examples here, and so do
# variants for lesser CPUs, which share most with the best one, and are the best one elsewhere. The
# nightly profile and `python -m ktk.testing NAME` run all of them at full length.
EXAMPLES = {BACKEND: 60, LAYER: 12}
FEWER = {BACKEND: 20, LAYER: 3}


def cases() -> Iterator[Any]:
    for name in NAMES:
        try:
            variants = plugin.load(name).variants
        except BackendUnsupported as error:  # a library is missing
            yield pytest.param(name, "", (), 0, marks=pytest.mark.skip(reason=str(error)))
            continue
        examples = EXAMPLES
        for variant in variants:  # the best one first
            if variant.runnable:
                yield from ((name, variant.name, *each) for each in examples.items())
                examples = FEWER


@pytest.mark.parametrize(("name", "variant", "modules", "examples"), list(cases()))
def test_backend_conforms(
    name: str,
    variant: str,
    modules: tuple[str, ...],
    examples: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    options = f"--ktk-variant {variant} --ktk-profile ci --ktk-examples {examples}"
    # One process for this variant alone, so that a crash ends nothing else.
    options += " --ktk-no-isolation"
    kit = f"-p ktk.testing.plugin --pyargs {' '.join(modules)} --ktk-backend {name} {options}"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *kit.split(), "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path_factory.mktemp("kit"),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
