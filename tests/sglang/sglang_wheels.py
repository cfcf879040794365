"""The Python files of SGLang's releases, from their wheels: what the tests drive is not changed.

A wheel is downloaded by pip where `KTK_TEST_DOWNLOAD=1` asks for it, and its Python files are kept
in a folder of the user's cache; without that, and without the files, tests are skipped.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import platformdirs
import pytest

WRAPPER = "sglang/srt/layers/moe/kt_ep_wrapper.py"
OPT_IN = "KTK_TEST_DOWNLOAD"


@dataclass(frozen=True)
class Wheel:
    """A release: where pip finds it, and the checksum of its wrapper."""

    name: str
    version: str
    sha256: str

    def download(self, into: Path) -> Path:
        """Have pip download the wheel for one fixed platform: only text is wanted of it."""
        options = ("--no-deps", "--only-binary=:all:", "--python-version=3.11", "-q")
        platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in (34, 35)]
        command = [sys.executable, "-m", "pip", "download", *options, *platforms, "-d", str(into)]
        subprocess.run(
            [*command, f"{self.name}=={self.version}"], capture_output=True, text=True, check=True
        )
        [wheel] = into.glob("*.whl")
        return wheel

    def files(self) -> Path:
        """Return the folder of the release's Python files; skips the test where there is none."""
        cache = Path(platformdirs.user_cache_dir("ktk")) / "tests"
        folder = cache / f"{self.name}-{self.version}"
        if not folder.is_dir() and os.environ.get(OPT_IN) != "1":
            pytest.skip(f"{self.name} {self.version} is not in {cache}; {OPT_IN}=1 downloads it")
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / f"{self.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.is_dir():
                self._fill(folder)
        found = hashlib.sha256((folder / WRAPPER).read_bytes()).hexdigest()
        assert found == self.sha256, f"{folder / WRAPPER} is not the release's: remove {folder}"
        return folder

    def _fill(self, folder: Path) -> None:
        part = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        with tempfile.TemporaryDirectory() as temporary:
            try:
                wheel = self.download(Path(temporary))
            except subprocess.CalledProcessError as error:
                said = (error.stderr.strip() or "pip said nothing").splitlines()[-1]
                pytest.skip(f"{self.name} {self.version} cannot be downloaded: {said}")
            with zipfile.ZipFile(wheel) as archive:
                wanted = [name for name in archive.namelist() if name.endswith(".py")]
                archive.extractall(part, wanted)
        part.rename(folder)


FORK = Wheel(
    "sglang-kt", "0.7.2", "1877366d1706c5e82dec4f783a951f16ba2d9e68e4414896f8785a0fc67aae73"
)
MAINLINE = Wheel(
    "sglang", "0.5.23", "57266e24a5a1e0472ba01dc5c098e834a2beb17d1a8e63da3108f1e099ded8af"
)
