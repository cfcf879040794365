"""A conversion may end at any moment and in any way; what is under its name is whole."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import checkpoints as made
import pytest

from ktk.conversion import Conversion, convert
from ktk.durable import locked, write_file
from ktk.errors import CheckpointError

HERE = Path(__file__).parent
# Calls for two layers of two experts: each file takes its room, is written, synced and renamed,
# and then its folder is synced.
FILES = {"ktk_packed.json": 1, "config.json": 1, "layer 0": 2 * 6 + 1, "layer 1": 2 * 6 + 1}
CALLS = sum(writes + 4 for writes in FILES.values())


@pytest.mark.slow
def test_every_call_may_be_the_last(tmp_path: Path) -> None:
    """Dies at each system call that changes a file, resumes, and finds the same bytes."""
    source = made.write(tmp_path / "source", layers=(0, 1), sizes=(2, 64, 96))
    before = made.contents(source)
    done = subprocess.run(
        [sys.executable, HERE / "kill_at.py", source, tmp_path, "AMXINT8"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert int(done.stdout) == CALLS
    assert made.contents(source) == before


@pytest.mark.slow
def test_any_moment_may_be_the_last(tmp_path: Path) -> None:
    """`KTK_KILLS` asks for more of them."""
    source = made.write(tmp_path / "source", layers=(0, 1, 2))
    kills = os.environ.get("KTK_KILLS", "5")
    done = subprocess.run(
        [sys.executable, HERE / "kill_randomly.py", source, tmp_path, "AMXINT4", kills, "1"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert int(done.stdout.split()[0]) == int(kills)


@pytest.mark.slow
def test_the_command_can_be_killed_and_resumed(tmp_path: Path) -> None:
    source = made.write(tmp_path / "source", layers=tuple(range(8)))
    command = [sys.executable, "-m", "ktk", "convert", str(source)]
    options = ["--backend", "AMXINT4", "--threads", "1"]
    output = tmp_path / "killed"
    process = subprocess.Popen([*command, output, *options], stderr=subprocess.PIPE)
    third = output / "layer-00002.safetensors"
    deadline = time.monotonic() + 60
    while not third.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert third.exists()
    stamps = {path: path.stat().st_mtime_ns for path in output.glob("layer-*.safetensors")}

    done = subprocess.run(
        [*command, output, *options, "--resume"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "are there already" in done.stderr
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps, "a layer was made again"
    convert(source, tmp_path / "whole", backend="AMXINT4")
    assert made.contents(output) == made.contents(tmp_path / "whole")


def test_a_file_that_cannot_have_its_name_leaves_nothing(tmp_path: Path) -> None:
    there = tmp_path / "name"
    (there / "of a folder").mkdir(parents=True)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(IsADirectoryError):
        write_file(there, b"text")
    assert os.listdir(tmp_path) == ["name"]
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_source_that_lacks_a_file_is_refused(tmp_path: Path) -> None:
    source = made.write(tmp_path / "source", layers=(0, 1))
    convert(source, tmp_path / "packed", backend="BF16")
    (tmp_path / "packed" / "layer-00001.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"layer-00001\.safetensors is missing"):
        convert(tmp_path / "packed", tmp_path / "again", backend="AMXINT8", layers=[0])
    assert not (tmp_path / "again").exists()


def test_layers_may_be_added(tmp_path: Path) -> None:
    source = made.write(tmp_path / "source", layers=(0, 1, 2))
    convert(source, tmp_path / "parts", backend="AMXINT8", layers=[2])
    convert(source, tmp_path / "parts", backend="AMXINT8", layers=[0, 2], resume=True)
    convert(source, tmp_path / "parts", backend="AMXINT8", layers=[1], resume=True)
    convert(source, tmp_path / "whole", backend="AMXINT8")
    assert made.contents(tmp_path / "parts") == made.contents(tmp_path / "whole")


def test_other_arguments_are_not_mixed_in(tmp_path: Path) -> None:
    source = made.write(tmp_path / "source")
    other = made.write(tmp_path / "other", layers=(0, 1))
    convert(source, tmp_path / "packed", backend="AMXINT4", group_size=64)
    before = made.contents(tmp_path / "packed")
    wrong: dict[str, dict[str, Any]] = {
        "backend AMXINT4, not AMXINT8": {"backend": "AMXINT8", "group_size": None},
        "group_size 64, not 32": {"backend": "AMXINT4", "group_size": 32},
    }
    for message, options in wrong.items():
        with pytest.raises(CheckpointError, match=message):
            convert(source, tmp_path / "packed", resume=True, **options)
    with pytest.raises(
        CheckpointError, match=r"begun from source, whose files were not those of .*other"
    ):
        convert(other, tmp_path / "packed", backend="AMXINT4", group_size=64, resume=True)
    with pytest.raises(CheckpointError, match="packed holds a conversion already"):
        convert(source, tmp_path / "packed", backend="AMXINT4", group_size=64)
    assert made.contents(tmp_path / "packed") == before


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_of_something_else_is_left_alone(tmp_path: Path, resume: bool) -> None:
    source = made.write(tmp_path / "source")
    before = made.contents(source)
    with pytest.raises(CheckpointError, match=r"source is not empty, it holds config\.json"):
        convert(source, source, backend="AMXINT8", resume=resume)
    assert made.contents(source) == before


def test_unfinished_files_of_others_are_left_alone(tmp_path: Path) -> None:
    """Browsers and players end the names of such with .part."""
    source = made.write(tmp_path / "source")
    output = tmp_path / "packed"
    output.mkdir()
    (output / "holiday.mkv.part").write_bytes(b"half")
    with pytest.raises(CheckpointError, match=r"is not empty, it holds holiday\.mkv\.part"):
        convert(source, output, backend="AMXINT8")
    (output / "holiday.mkv.part").unlink()
    convert(source, output, backend="AMXINT8")
    (output / "holiday.mkv.part").write_bytes(b"half")
    convert(source, output, backend="AMXINT8", resume=True)
    assert (output / "holiday.mkv.part").read_bytes() == b"half"


def test_one_process_at_a_time(tmp_path: Path) -> None:
    source = made.write(tmp_path / "source")
    output = tmp_path / "packed"
    output.mkdir()
    with (
        locked(output),
        pytest.raises(CheckpointError, match="packed is being written by another process"),
    ):
        convert(source, output, backend="AMXINT8")
    convert(source, output, backend="AMXINT8")


def test_a_conversion_holds_its_folder(tmp_path: Path) -> None:
    source = made.write(tmp_path / "source")
    with Conversion(source, tmp_path / "packed", backend="AMXINT8") as conversion:
        steps = conversion.run()
        next(steps)
        with pytest.raises(CheckpointError, match="being written by another process"):
            convert(source, tmp_path / "packed", backend="AMXINT8", resume=True)
        for _ in steps:
            pass
    convert(source, tmp_path / "packed", backend="AMXINT8", resume=True)


def test_an_abandoned_conversion_leaves_nothing_unfinished(tmp_path: Path) -> None:
    source = made.write(tmp_path / "source", layers=(0, 1))
    with Conversion(source, tmp_path / "packed", backend="AMXINT8") as conversion:
        steps = conversion.run()
        for _ in range(made.E + 1):
            next(steps)
        steps.close()  # type: ignore[attr-defined]
    assert sorted(made.contents(tmp_path / "packed")) == [
        "config.json",
        "ktk_packed.json",
        "layer-00000.safetensors",
    ]


# --- full disks ---------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no tmpfs can be mounted here: {error}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_too_small_is_found_before_the_first_layer(
    tmp_path: Path, small_disk: Path
) -> None:
    source = made.write(tmp_path / "source", layers=(0, 1, 2))
    with pytest.raises(CheckpointError, match=r"disk/packed has .* free, and the .* needs 1\.8 MB"):
        convert(source, small_disk / "packed", backend="AMXINT8")
    assert made.contents(small_disk / "packed") == {}


def test_a_disk_that_fills_up_keeps_what_is_finished(tmp_path: Path, small_disk: Path) -> None:
    source = made.write(tmp_path / "source", layers=(0, 1))
    before = made.contents(source)
    output = small_disk / "packed"
    with Conversion(source, output, backend="AMXINT4") as conversion:
        steps = conversion.run()
        for _ in range(made.E):
            next(steps)
        # Somebody else writes to the same disk.
        filler = small_disk / "filler"
        _fill(filler, leave=100_000)
        with pytest.raises(CheckpointError, match=r"packed is full: layer 1 needs 0\.\d MB"):
            next(steps)
    assert "layer-00000.safetensors" in made.contents(output)
    assert len(made.contents(output)) == 3, "an unfinished file was left"
    filler.unlink()
    convert(source, output, backend="AMXINT4", resume=True)
    convert(source, tmp_path / "whole", backend="AMXINT4")
    assert made.contents(output) == made.contents(tmp_path / "whole")
    assert made.contents(source) == before


def _fill(path: Path, *, leave: int) -> None:
    disk = os.statvfs(path.parent)
    # The first layer becomes a file of its own only after this: it has its room already.
    path.write_bytes(bytes(max(disk.f_bavail * disk.f_frsize - leave, 0)))


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite", "fsync"])
def test_any_write_may_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """As a file system without reservations, or a quota, lets it fail."""
    source = made.write(tmp_path / "source", layers=(0, 1))
    output = tmp_path / "packed"
    convert(source, output, backend="AMXINT8", layers=[0])
    before = made.contents(output)
    real = getattr(os, call)

    def fail(fd: int, *arguments: Any) -> Any:
        if "layer" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        return real(fd, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(CheckpointError, match="packed is full: layer 1 needs"):
            convert(source, output, backend="AMXINT8", resume=True)
    after = made.contents(output)
    assert after.pop("ktk_packed.json") != before.pop("ktk_packed.json"), "layer 1 is to come"
    assert after == before
    convert(source, output, backend="AMXINT8", resume=True)


def test_a_limit_on_the_size_of_files_is_reported(tmp_path: Path) -> None:
    source = made.write(tmp_path / "source")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(CheckpointError, match="packed is full: layer 0 needs"):
            convert(source, tmp_path / "packed", backend="AMXINT8")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert set(made.contents(tmp_path / "packed")) == {"config.json", "ktk_packed.json"}
