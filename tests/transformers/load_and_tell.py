"""Loads a model in a process of its own, and prints what it takes: python load_and_tell.py ..."""

import json
import sys
from pathlib import Path


def anonymous() -> int:
    """Return the bytes of this process that no file backs."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


if __name__ == "__main__":
    import ktk.transformers
    from ktk.transformers.packed import packed_modules

    folder, backend = sys.argv[1:]
    ktk.transformers.load(folder + "-warm", backend=backend)  # what is made once: pools, modules
    before = anonymous()
    print("ready", flush=True)
    sys.stdin.readline()
    model = ktk.transformers.load(folder, backend=backend)
    packed = sum(one.moe.nbytes for one in packed_modules(model).values())
    rest = sum(one.nbytes for one in model.parameters())
    after = anonymous() - before
    print(
        json.dumps({"before": before, "packed": packed, "rest": rest, "after": after}), flush=True
    )
