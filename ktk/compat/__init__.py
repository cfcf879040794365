"""kt-kernel's name: a package `kt_kernel` that is ktk, for programs that import it.

The package is in the folder `pythonpath`, which no installation of ktk puts on anybody's path:
`kt_kernel` stays whatever is installed until somebody asks for ktk in its place. There are three
ways: :func:`folder` in front of PYTHONPATH, a wheel (:mod:`ktk.compat.wheel`), and
:func:`provide` inside a process.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

#: The release of kt-kernel whose interface this is, which sglang-kt requires by this number.
INTERFACE = "0.7.2"
PACKAGE = "kt_kernel"


def folder() -> Path:
    """Return the folder in which `kt_kernel` is ktk, to stand first in PYTHONPATH."""
    return Path(__file__).parent / "pythonpath"


def kt_version() -> str:
    """Return the version of `kt_kernel`: kt-kernel's, and ktk's as the local part.

    A requirement ``kt-kernel==0.7.2`` is satisfied by it (PEP 440).
    """
    own = re.sub("[^a-z0-9]+", ".", version("ktk").lower())
    return f"{INTERFACE}+ktk.{own}"


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of the environment in which Python finds ktk as `kt_kernel`.

    Processes that are started from there inherit it.
    """
    paths = [str(folder()), *filter(None, [given.get("PYTHONPATH")])]
    return {**given, "PYTHONPATH": os.pathsep.join(paths)}


def provide() -> bool:
    """Let `import kt_kernel` give ktk in this process, unless a kt_kernel is installed.

    Returns
    -------
    bool
        Whether `kt_kernel` comes from :func:`folder` now.
    """
    if importlib.util.find_spec(PACKAGE) is None:
        sys.path.append(str(folder()))
    spec = importlib.util.find_spec(PACKAGE)
    return spec is not None and Path(spec.origin or "").is_relative_to(folder())
