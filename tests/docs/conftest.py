"""Small models under the names that the pages use, in a folder that the blocks run in."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "text"), str(HERE.parent / "transformers")]

#: What the pages call them; all are one small Qwen3-MoE.
NAMES = (
    "MODEL",
    "Qwen3-30B-A3B",
    "allenai/OLMoE-1B-7B-0125-Instruct",
    "GLM-4.6",
    "Kimi-K2-Thinking",
)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the models once: a folder with a link to one for each name, and a GGUF file."""
    pytest.importorskip("transformers")
    import gguf_model
    import text_models

    folder = tmp_path_factory.mktemp("models")
    tiny = text_models.write(folder / "tiny", num_hidden_layers=10)
    for name in NAMES:
        shutil.copytree(tiny, folder / name)
    path, _ = gguf_model.write(folder)
    path.rename(folder / "Qwen3-30B-A3B-Q4_K_M.gguf")
    shutil.rmtree(tiny)
    return folder


@pytest.fixture
def workplace(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy the models into a folder, go there, and keep the user's own settings out."""
    place = tmp_path / "place"
    shutil.copytree(models, place)
    for name in ("examples", "tools"):  # what commands of the pages name
        (place / name).symlink_to(HERE.parents[1] / name)
    monkeypatch.chdir(place)
    for variable in ("XDG_CONFIG_HOME", "XDG_STATE_HOME", "HF_HOME"):
        monkeypatch.setenv(variable, str(tmp_path / variable))
    for variable in (
        "KTK_BACKEND",
        "KTK_DEVICE",
        "KTK_LINEARS",
        "KTK_HEAD",
        "KTK_MODELS",
        "HF_HUB_CACHE",
    ):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("KTK_THREADS", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    # `python` and `ktk` of the blocks are those that run the tests.
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    return place
