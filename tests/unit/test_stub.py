"""The type stub of the core is checked in, because cross builds cannot run the module."""

import subprocess
import sys
from pathlib import Path

import ktk


def test_the_stub_describes_the_module(tmp_path: Path) -> None:
    new = tmp_path / "_core.pyi"
    command = [sys.executable, "-m", "nanobind.stubgen", "-q", "-m", "ktk._core", "-o", str(new)]
    subprocess.run(command, check=True, cwd=tmp_path)
    kept = Path(ktk.__file__).with_name("_core.pyi")
    message = f"run: {' '.join(map(str, command[:-1]))} ktk/_core.pyi"
    assert new.read_text() == kept.read_text(), message
