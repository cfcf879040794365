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
            backend = plugin.load(name)
        except BackendUnsupported as error:  # a library is missing
            yield pytest.param(name, (), (), 0, id=name, marks=pytest.mark.skip(reason=str(error)))
            continue
        default = backend.core.default_variant()
        runnable = [variant.name for variant in backend.variants if variant.runnable]
        runnable.sort(key=lambda variant: variant != default)
        # Starting Python and torch takes as long as a variant's properties: others share a process.
        for chosen, of_modules in ((runnable[:1], EXAMPLES), (runnable[1:], FEWER)):
            for modules, examples in of_modules.items() if chosen else ():
                what = "backend" if modules == BACKEND else "layer"
                yield pytest.param(
                    name, chosen, modules, examples, id="-".join((name, *chosen, what))
                )


@pytest.mark.parametrize(("name", "variants", "modules", "examples"), list(cases()))
def test_backend_conforms(
    name: str,
    variants: list[str],
    modules: tuple[str, ...],
    examples: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    options = ["--ktk-profile", "ci", "--ktk-examples", str(examples)]
    for variant in variants:
        options += ["--ktk-variant", variant]
    kit = ["-p", "ktk.testing.plugin", "--pyargs", *modules, "--ktk-backend", name, *options]

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "pytest", *kit, *more, "-q", "-p", "no:cacheprovider"],
            cwd=tmp_path_factory.mktemp("kit"),
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )

    # Large layers take as long with few examples as with many.
    small = ("-k", "not as_large_as_those_of_models") if examples in FEWER.values() else ()
    done = run("--ktk-no-isolation", *small)
    said = done.stdout[-6000:] + done.stderr[-2000:]
    if done.returncode < 0:  # a signal ended all of them: whose was it?
        said += run().stdout[-6000:]
    assert done.returncode == 0, said
    assert " passed" in done.stdout
