"""tools/fresh: what the new machine is given, and that a command that fails there is noticed.

Namespaces, mounts and Debian are stand-ins: commands run here, in the folder of the new machine.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "fresh"
README = """# ktk

    pip install -c constraints ".[run]" && ktk demo
    pip install -c constraints "ktk[testing]" && pytest -n auto
"""
STAND_INS = {
    "git": 'cat "$LISTED"',
    "mount": "exit 0",
    "python3": "exit 0",  # pip's configuration
    "unshare": 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"',
    "mmdebstrap": 'for last; do :; done; mkdir etc proc; tar -cf "$last" ./etc ./proc',
    # Of the script, what follows the virtual environment and the way to the sources.
    "chroot": 'cd "$1/root/ktk" || exit; sed "1,/^cd /d" "$1/run.sh" > "$1/rest"\n'
    'exec bash -e "$1/rest"',
    "pip": 'echo "pip $*"; case "$*" in *"${FAILS:-nothing}"*) exit 3; esac',
    "ktk": 'echo "ktk $*"',
    "pytest": 'echo "pytest $*"',
}


class Machine:
    """A source tree with the tool, and the stand-ins."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.source = folder, folder / "source"
        for name in ("source/tools", "bin", "here"):
            (folder / name).mkdir(parents=True)
        shutil.copy(TOOL, self.source / "tools")
        (self.source / "README.md").write_text(README)
        for name, text in STAND_INS.items():
            (folder / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
            (folder / "bin" / name).chmod(0o755)

    def run(
        self, *arguments: str, listed: str = "README.md", fails: str = "nothing"
    ) -> subprocess.CompletedProcess[str]:
        (self.folder / "listed").write_text(listed.replace("\n", "\0") + "\0")
        path = os.pathsep.join([str(self.folder / "bin"), os.environ["PATH"]])
        names = {"PATH": path, "LISTED": str(self.folder / "listed"), "FAILS": fails}
        command = [self.source / "tools/fresh", "--cache", self.folder / "cache", *arguments]
        return subprocess.run(
            list(map(str, command)),
            cwd=self.folder / "here",
            env=os.environ | names,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_set_up_commands_run_one_after_the_other(machine: Machine) -> None:
    done = machine.run()
    assert done.returncode == 0, done.stderr
    lines = ["pip install -c constraints .[run]", "ktk demo"]
    lines += ["pip install -c constraints ktk[testing]", "pytest -n auto"]
    assert done.stdout.splitlines() == lines
    done = machine.run("--readme", "2")
    assert done.stdout.splitlines() == lines[2:]


def test_a_command_that_fails_before_another_ends_all(machine: Machine) -> None:
    done = machine.run(fails=".[run]")
    assert done.returncode == 3
    assert done.stdout == "pip install -c constraints .[run]\n"


def test_files_that_were_deleted_are_left_out(machine: Machine) -> None:
    """The last one listed is the status of the loop."""
    done = machine.run("ls", listed="deleted too\nREADME.md\ndeleted")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "README.md\n"


def test_arguments_stay_what_they_are(machine: Machine) -> None:
    done = machine.run("printf", "<%s>", "two words", "a; b", "$HOME")
    assert done.stdout == "<two words><a; b><$HOME>"
    done = machine.run("echo one && echo two")
    assert done.stdout == "one\ntwo\n"
