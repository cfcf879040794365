"""tools/release: what it refuses, and what its wheels need elsewhere."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

TOOLS = Path(__file__).parents[2] / "tools"


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
