"""A wheel of kt-kernel's name that holds ktk's `kt_kernel`.

It is for environments without kt-kernel, whose programs require the distribution. It holds the
files of `pythonpath` and nothing else: ktk stays a distribution of its own. The same ktk writes the
same bytes anywhere.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from base64 import urlsafe_b64encode
from importlib.metadata import version
from pathlib import Path

from ktk.compat import PACKAGE, folder, kt_version
from ktk.durable import write_file

# The first moment that zip files can say.
_TIME = (1980, 1, 1, 0, 0, 0)


def write_wheel(into: Path) -> Path:
    """Write the wheel and return its path.

    Parameters
    ----------
    into : path
        Folder; made if it is not there. A wheel of the same name is replaced.
    """
    name = f"{PACKAGE}-{kt_version()}"
    sources = sorted((folder() / PACKAGE).rglob("*.py"))
    files = {str(path.relative_to(folder())): path.read_bytes() for path in sources}
    info = f"{name}.dist-info"
    files[f"{info}/METADATA"] = _metadata().encode()
    files[f"{info}/WHEEL"] = (
        b"Wheel-Version: 1.0\nGenerator: ktk compat\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    files[f"{info}/RECORD"] = _record(files, f"{info}/RECORD").encode()
    packed = io.BytesIO()
    # Stored: what deflate makes depends on the version of zlib.
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as archive:
        for path, data in files.items():
            entry = zipfile.ZipInfo(path, _TIME)
            entry.external_attr = 0o100644 << 16
            archive.writestr(entry, data)
    into.mkdir(parents=True, exist_ok=True)
    wheel = into / f"{name}-py3-none-any.whl"
    write_file(wheel, packed.getvalue())
    return wheel


def _metadata() -> str:
    lines = (
        "Metadata-Version: 2.1",
        "Name: kt-kernel",
        f"Version: {kt_version()}",
        "Summary: kt-kernel's interface, computed by ktk. Written by ktk compat --wheel.",
        "License: Apache-2.0",
        "Requires-Python: >=3.11",
        f"Requires-Dist: ktk >={version('ktk')}",
    )
    return "\n".join((*lines, ""))


def _record(files: dict[str, bytes], itself: str) -> str:
    """List all files with their checksums, as the format of wheels wants."""
    rows = []
    for path, data in files.items():
        digest = urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows.append(f"{path},sha256={digest},{len(data)}\n")
    return "".join((*rows, f"{itself},,\n"))
