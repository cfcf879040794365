"""tools/release: what it refuses, what its wheels need, and licenses of what they contain."""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / "tools"


def test_what_is_no_checkout_is_refused_as_that(tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    shutil.copy(TOOLS / "release", tmp_path / "tools")
    done = subprocess.run(
        [tmp_path / "tools" / "release", tmp_path / "out"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert f"{tmp_path} is no git checkout" in done.stderr
    assert "not committed" not in done.stderr


def test_the_emulated_machine_has_what_its_wheels_need() -> None:
    added = re.findall(r'\\n  "([\w-]+) >=', (TOOLS / "release").read_text())
    assert added == ["nanobind-backend"]
    assert set(added) <= set((TOOLS / "numa" / "site.txt").read_text().splitlines())


@pytest.mark.parametrize("package", ["gguf", "nanobind"])
def test_licenses_of_what_wheels_contain_are_in_them(package: str) -> None:
    try:
        files = metadata.files(package) or []
    except metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed here: there is no license to compare with")
    [text] = [Path(str(one.locate())).read_text() for one in files if one.name == "LICENSE"]
    named = "subprojects/LICENSES.txt"
    assert f'"{named}"' in (ROOT / "pyproject.toml").read_text()
    assert text.strip() in (ROOT / named).read_text()
