"""Run pytest in this process with AMX done in software, on any machine with AVX-512.

    python run_emulated.py COUNTS.json [pytest arguments]

Tile data is denied to the process first, so that AMX traps even where the CPU has it. Afterwards
COUNTS.json says how often each instruction was executed in software.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import amx_tools


def main(counts: Path, arguments: list[str]) -> int:
    amx_tools.deny_amx()
    os.environ["KTK_ISA_FORCE"] = ",".join(["amx", *amx_tools.HIDDEN])
    soft = amx_tools.Soft(amx_tools.build())

    import pytest

    class Trap:
        """Whoever takes SIGILL last gets it: install behind pytest's faulthandler."""

        def pytest_sessionstart(self) -> None:
            if soft.install_trap() != 0:
                raise pytest.UsageError("the AMX trap could not be installed")
            amx_tools.trapped, amx_tools.trap = True, soft

    status = pytest.main(["-p", "no:cacheprovider", *arguments], plugins=[Trap()])
    counts.write_text(json.dumps(soft.counts()))
    return int(status)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
