"""Libraries for the BLIS backend: the stand-in in its variations, and Debian's."""

from __future__ import annotations

import functools
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DEBIAN = Path("/usr/lib", f"{platform.machine()}-linux-gnu")
# What the backend looks for, in this order.
NAMES = (
    "libaocl-dlp.so",
    "libblis-mt.so.5",
    "libblis-mt.so",
    "libblis.so.5",
    "libblis.so.4",
    "libblis.so",
)


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="ktk-blis-")


@functools.cache
def standin(*variations: str) -> Path:
    """Build the stand-in with these macros; the same ones give the same file."""
    path = Path(_folder().name, f"libstandin-{'-'.join(variations) or 'plain'}.so")
    flags = [f"-D{variation}" for variation in variations]
    compile_command = ["cc", "-std=gnu11", "-O3", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([*compile_command, *flags, HERE / "standin.c", "-o", path], check=True)
    return path


def debian(flavour: str) -> Path | None:
    """Return the library of one of Debian's packages (openmp, pthread, serial), if installed."""
    path = DEBIAN / f"blis-{flavour}" / "libblis.so.4"
    return path if path.exists() else None


_SERVER = """
import json, os, sys, warnings
import ktk

def describe():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            backend = ktk.load_backend("BLIS")
        except ktk.BackendUnsupported as error:
            return {"error": str(error)}
        assert ktk.load_backend("BLIS") is backend
    return {
        "library": backend.library,
        "layouts": {variant.name: variant.layout for variant in backend.variants},
        "warnings": [str(entry.message) for entry in caught],
    }

for line in sys.stdin:
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.dup2(2, 1)  # the stand-in prints
        os.environ.update(json.loads(line))
        os.write(writer, (json.dumps(describe()) + "\\n").encode())
        os._exit(0)
    os.close(writer)
    os.wait()
    print(os.fdopen(reader).readline(), end="", flush=True)
"""


@functools.cache
def _server() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=_folder().name,
        text=True,
    )


def describe(library: Path | str, **environment: str) -> dict[str, Any]:
    """Load BLIS on a library, in a process that has loaded everything else before it was forked.

    Returns
    -------
    ``library``, ``layouts`` (by variant) and ``warnings``, or ``error``.
    """
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps({"KTK_BLIS_LIBRARY": str(library), **environment}) + "\n")
    server.stdin.flush()
    found: dict[str, Any] = json.loads(server.stdout.readline())
    return found


def python(code: str, *, check: bool = True, **environment: str) -> Any:
    """Run a script in a process of its own, for the library is one per process.

    Returns
    -------
    What its last line of output says in JSON; with ``check=False`` the process.
    """
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(HERE), **environment},
        cwd=_folder().name,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if not check:
        return done
    assert done.returncode == 0, done.stderr[-4000:]
    # The stand-in's own words come before or after, as the C library likes.
    lines = [line for line in done.stdout.splitlines() if not line.startswith("stand-in: ")]
    return json.loads(lines[-1])
