"""Kills conversions at random moments, and goes on with each until it is done.

    python kill_randomly.py SOURCE FOLDER BACKEND KILLS SEED

Whatever is under its name must be whole after each kill, and the folder in the end that of a
conversion that nobody disturbs. Prints how many kills hit, and how many conversions ended.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

from kill_at import contents, in_child

from ktk.conversion import convert


def main() -> None:
    source, folder, backend = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    kills, rng = int(sys.argv[4]), random.Random(int(sys.argv[5]))
    # In this process, so that children need not import and look up everything again.
    convert(source, folder / "expected", backend=backend)
    began = time.monotonic()
    assert in_child(lambda: convert(source, folder / "once", backend=backend, threads=2)) == 0
    whole = time.monotonic() - began
    assert threading.active_count() == 1, "a process with threads is not to be forked"
    expected, before = contents(folder / "expected"), contents(source)
    output = folder / "killed"
    hit = ended = 0
    while hit < kills:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                convert(source, output, backend=backend, threads=2, resume=True)
                status = 0
            except BaseException as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            finally:
                os._exit(status)
        time.sleep(rng.uniform(0, whole))
        os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
        for path in output.glob("layer-*.safetensors"):
            assert path.read_bytes() == expected[path.name], f"kill {hit}: {path.name} is not whole"
        if os.WIFSIGNALED(status):
            hit += 1
            continue
        assert status == 0, f"after kill {hit}: it cannot be gone on with"
        assert contents(output) == expected, f"after kill {hit}: other files"
        shutil.rmtree(output)
        ended += 1
    assert in_child(lambda: convert(source, output, backend=backend, resume=True)) == 0
    assert contents(output) == expected
    assert contents(source) == before
    print(hit, ended)


if __name__ == "__main__":
    main()
