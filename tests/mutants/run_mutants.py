"""Compiles the backends of the C files here, and runs the kit on them."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Collection, Iterator
from pathlib import Path

import ktk

HERE = Path(__file__).parent
CFLAGS = (
    "-std=gnu11 -O2 -ffp-contract=off -Wall -Wextra -Werror -Wno-override-init"
    " -Wno-missing-field-initializers -fPIC -fexceptions"
)
OPTIONS = ("--ktk-no-shrink", "--ktk-profile=ci")


def compile_all(folder: Path) -> Path:
    """Return the library of all mutants."""
    made = folder / "libmutants.so"
    include = ["-isystem", ktk.get_include()]
    subprocess.run(
        ["cc", *CFLAGS.split(), *include, "-c", *sorted(HERE.glob("*.c"))], cwd=folder, check=True
    )
    objects = map(str, sorted(folder.glob("*.o")))
    command = ["c++", "-fPIC", "-shared", str(HERE / "throws.cc"), *objects, "-o", str(made), "-lm"]
    subprocess.run(command, check=True)
    return made


def run_kit(
    library: Path, modules: Collection[str], backends: Collection[str], *options: str
) -> Iterator[ET.Element]:
    """Run modules of the kit once on several mutants, and yield a test case for each property."""
    report = library.parent / "report.xml"
    chosen = [part for name in backends for part in ("--ktk-backend", name)]
    kit = f"-p ktk.testing.plugin -p no:cacheprovider --pyargs {' '.join(modules)} -q"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", *kit.split(), *chosen, *OPTIONS, *options),
            f"--junitxml={report}",
        ],
        env=os.environ | {"KTK_MUTANTS": str(library), "PYTHONPATH": str(HERE)},
        cwd=library.parent,
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 1, done.stdout[-4000:] + done.stderr[-2000:]
    for case in ET.parse(report).getroot().iter("testcase"):
        assert case.find("error") is None, ET.tostring(case)
        yield case
