"""Lets tests import the modules beside them, and makes what they share once."""

from __future__ import annotations

import io
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parents[1] / "transformers"))

from terminal import Command, Done

from ktk import pool


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small model that can chat."""
    pytest.importorskip("transformers")
    import text_models

    return text_models.write(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the user's configuration out, and transcripts in."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    # Small models are quick on one thread, also where others compute.
    monkeypatch.setenv("KTK_THREADS", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    own = (f"KTK_{name}" for name in ("BACKEND", "DEVICE", "LINEARS", "HEAD", "MODELS"))
    for variable in (*own, "HF_HUB_CACHE", "NO_COLOR"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture(autouse=True)
def own_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave the pool of this process to other tests as it was."""
    monkeypatch.setattr(pool, "_threads", pool._threads)
    yield
    pool.default_pool.forget()


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Return a function that runs `ktk` in this process, with text in the place of a pipe."""

    def run(*arguments: str, text: str = "") -> Done:
        from ktk.__main__ import main

        monkeypatch.setattr(sys, "argv", ["ktk", *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        written = capsys.readouterr()
        return Done(int(ended.value.code or 0), *written)

    return run
