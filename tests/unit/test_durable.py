"""Several processes may write one file, and what they leave when they are killed goes."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from ktk.durable import (
    LOCK,
    TEMPORARY,
    PendingFile,
    locked,
    remove_temporaries,
    replaced,
    write_file,
)

A, B = b"A" * 10, b"B" * 20


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """A file that a killed process has left, of the path `tmp_path`/file."""
    program = f"""
import os, pathlib, signal
from ktk.durable import PendingFile
PendingFile(pathlib.Path({str(tmp_path / "file")!r}), 10).write(b"half", 0)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", program], check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    (found,) = tmp_path.iterdir()
    assert found.name.startswith("file.")
    assert found.name.endswith(TEMPORARY)
    return found


@pytest.mark.parametrize("first", [0, 1])
def test_two_writers_do_not_mix(tmp_path: Path, first: int) -> None:
    path = tmp_path / "file"
    writers = [(PendingFile(path, len(data)), data) for data in (A, B)]
    for pending, data in writers:
        pending.write(data, 0)
    for pending, data in (writers[first], writers[1 - first]):
        pending.commit()
        assert path.read_bytes() == data
    assert os.listdir(tmp_path) == ["file"]


def give_up(path: Path) -> None:
    with replaced(path) as written:
        written.write_bytes(b"half")
        raise ZeroDivisionError


def test_one_that_gives_up_leaves_the_others(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with replaced(path) as written:
        PendingFile(path, 3).discard()
        write_file(path, B)
        written.write_bytes(A)
        with pytest.raises(ZeroDivisionError):
            give_up(path)
        assert path.read_bytes() == B
    assert path.read_bytes() == A
    assert os.listdir(tmp_path) == ["file"]


def test_the_next_writer_removes_what_a_killed_one_left(left: Path) -> None:
    write_file(left.with_name("another"), A)
    assert left.exists(), "it is of another path"
    write_file(left.with_name("file"), A)
    assert sorted(os.listdir(left.parent)) == ["another", "file"]


def test_what_was_left_is_found_without_its_path(left: Path) -> None:
    alive = PendingFile(left.with_name("alive"), len(A))
    remove_temporaries(left.parent)
    assert not left.exists()
    alive.write(A, 0)
    alive.commit()
    assert os.listdir(left.parent) == ["alive"]


def test_files_of_others_stay(tmp_path: Path) -> None:
    names = ["file.part", "file.1-0.part", f"elsewhere{TEMPORARY}x"]
    for name in names:
        (tmp_path / name).write_bytes(A)
    (tmp_path / f"file.1-0{TEMPORARY}").mkdir()
    (tmp_path / f"file.1-1{TEMPORARY}").symlink_to(tmp_path / "file.part")
    write_file(tmp_path / "file", B)
    remove_temporaries(tmp_path)
    assert {name for name in names if (tmp_path / name).read_bytes() == A} == set(names)


@pytest.mark.parametrize("folder", ["absent", "file"])
def test_an_error_names_the_file_that_was_wanted(folder: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(A)
    wanted = tmp_path / folder / "new"
    with pytest.raises(OSError, match="directory") as caught:
        write_file(wanted, B)
    assert caught.value.filename == str(wanted)


# A process whose files may have 100 bytes stands for a full disk.
_LIMITED = """
import pathlib, resource, signal, sys
from ktk.durable import PendingFile
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
path = pathlib.Path(sys.argv[1])
for attempt in (lambda: PendingFile(path, 101), lambda: PendingFile(path, 1).write(b"1", 100)):
    try:
        attempt()
    except OSError as error:
        print(error.errno, error.filename)
"""


def test_an_error_of_the_disk_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    command = [sys.executable, "-c", _LIMITED, str(path)]
    said = subprocess.run(command, check=True, timeout=60, capture_output=True, text=True).stdout
    assert said.splitlines() == [f"{errno.EFBIG} {path}"] * 2


def test_a_name_with_signs_of_patterns_is_a_name(tmp_path: Path) -> None:
    for name in ("[a]*", "[a]*b"):
        write_file(tmp_path / name, A)
    assert sorted(os.listdir(tmp_path)) == ["[a]*", "[a]*b"]


def test_a_file_that_a_block_makes_anew_stays_its_own(tmp_path: Path) -> None:
    """As safetensors' save_file does: the lock stays with the file that was there before."""
    path = tmp_path / "adapter"
    with replaced(path) as temporary:
        (tmp_path / "new").write_bytes(b"block")
        (tmp_path / "new").replace(temporary)
        code = "import sys; from pathlib import Path; from ktk.durable import write_file;"
        code += "write_file(Path(sys.argv[1]), b'other')"
        subprocess.run([sys.executable, "-c", code, str(path)], check=True)
    assert path.read_bytes() == b"block"


def test_a_file_keeps_who_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_file(path, A)
    path.chmod(0o600)
    write_file(path, B)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with replaced(path) as temporary:
        (tmp_path / "new").write_bytes(A)
        (tmp_path / "new").replace(temporary)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("is_link", [False, True])
def test_what_is_no_file_is_not_replaced(tmp_path: Path, is_link: bool) -> None:
    """As /dev/null and /dev/stdout are none."""
    pipe = path = tmp_path / "pipe"
    os.mkfifo(pipe)
    if is_link:
        path = tmp_path / "link"
        path.symlink_to(pipe)
    with pytest.raises(OSError, match=rf"is no regular file: '{path}'"):
        write_file(path, A)
    with pytest.raises(OSError, match="is no regular file"):
        give_up(path)
    assert pipe.is_fifo()
    assert path.is_symlink() == is_link


def test_a_lock_stays_where_something_was_begun(tmp_path: Path) -> None:
    def fail() -> None:
        with locked(tmp_path):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not os.listdir(tmp_path)
    with locked(tmp_path):
        pass
    with pytest.raises(ZeroDivisionError):
        fail()
    assert os.listdir(tmp_path) == [LOCK], "of the one before"
