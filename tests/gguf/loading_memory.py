"""Loads layer 0 of a GGUF file, and prints what memory that takes: loading_memory.py FILE BACKEND.

With a number behind, so many experts are kept that should have been let go. `measured` runs this in
a process of its own, in which malloc gives back what is freed: elsewhere the memory of an expert
that was read is still there when the next layer is loaded, or not, by what else the process did.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

# Blocks from this size on are mapped one by one; without it, glibc raises the limit as it goes.
MAPPED = 1 << 16


def measured(path: Path, backend: str, kept: int = 0) -> dict[str, int]:
    """Return bytes: `layer` packed, and taken in all by `end` and at `most` beside each expert."""
    done = subprocess.run(
        [sys.executable, __file__, path, backend, str(kept)],
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": str(MAPPED)},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def anonymous() -> int:
    """Return the bytes of this process that no file backs, counted page by page.

    /proc/self/status has them faster, and wrong by up to some dozen pages for each CPU.
    """
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return 1024 * int(rollup.split("Anonymous:")[1].split()[0])


def main(path: Path, backend: str, kept: int) -> None:
    import ktk

    ktk.MoE.from_checkpoint(path, 0, backend)  # what is imported and allocated once
    seen: list[int] = []
    leak: list[Any] = []
    load_expert = ktk.MoE.load_expert

    def watched(self: ktk.MoE, *arguments: Any, **arrays: Any) -> None:
        seen.append(anonymous())
        load_expert(self, *arguments, **arrays)
        leak.extend([arguments, arrays] if len(leak) < 2 * kept else [])
        seen.append(anonymous())

    setattr(ktk.MoE, "load_expert", watched)  # noqa: B010
    before = anonymous()
    moe = ktk.MoE.from_checkpoint(path, 0, backend)
    end = anonymous()
    found = {"layer": moe.nbytes, "end": end - before, "most": max(seen) - before}
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
