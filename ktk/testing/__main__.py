"""Run the conformance kit: python -m ktk.testing NAME... [pytest arguments]."""

from __future__ import annotations

import importlib.util
import sys

from ktk.testing import BACKEND, LAYER

USAGE = """\
usage: python -m ktk.testing NAME [NAME ...] [--ktk-variant VARIANT] [--ktk-profile PROFILE]
                             [--ktk-time-limit SECONDS] [--ktk-no-isolation] [pytest arguments]

NAME is a backend that is installed, or an object with __ktk_backend__() written as in an entry
point ("my_package.module" or "my_package.module:object"). Profiles: dev (25 examples of each
property, the default), ci (100, always the same ones), nightly (2000).

Each property runs in a process of its own: a crash, or an example that takes longer than the time
limit (60 s), is a failure of that property, and the others run. --ktk-no-isolation is for
debuggers.
"""


def main(arguments: list[str]) -> int:
    """Return the exit status of pytest, or 2 without it; names come before its arguments."""
    names = []
    while arguments and not arguments[0].startswith("-"):
        names.append(arguments.pop(0))
    if not names:
        print(USAGE)
        return 0 if {"-h", "--help"} & set(arguments) else 2
    for library in ("pytest", "hypothesis"):
        if importlib.util.find_spec(library) is None:
            print(
                f'the conformance kit needs {library}: pip install "ktk[kit]" (or, in ktk\'s source'
                ' tree, pip install ".[kit]")',
                file=sys.stderr,
            )
            return 2
    import pytest

    chosen = [part for name in names for part in ("--ktk-backend", name)]
    return int(
        pytest.main(["-p", "ktk.testing.plugin", "--pyargs", *BACKEND, *LAYER, *chosen, *arguments])
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
