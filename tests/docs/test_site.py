"""The site builds without a warning."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from blocks import ROOT


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    for package in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(package, reason='pip install ".[docs]"')
    # Folders of its own: nothing is written into the checkout.
    folders = ["-d", str(tmp_path / "doctrees"), str(ROOT), str(tmp_path / "site")]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going"),
            "-c",
            ROOT / "docs",
            *folders,
        ],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    reference = (tmp_path / "site/docs/reference.html").read_text()
    for name in ("MoE.__call__", "MoE.forward_train", "Linear.__call__", "sft.merge"):
        assert f'id="ktk.{name}"' in reference
    assert 'title="ktk.Lora.rank"' not in reference  # a word of types: array [experts, rank, ...]
    home = (tmp_path / "site/docs/index.html").read_text()
    assert "Run your first model" in home or "tutorials" in home
