"""Long work that is not on a terminal says how far it is, line by line."""

from __future__ import annotations

import io
import json
import os
import pty
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from ktk.progress import EVERY, Progress
from ktk.sizes import duration
from ktk.terminal import doing

sys.path.insert(0, str(Path(__file__).parent.parent / "packed"))
import checkpoints as made


def test_a_step_with_brackets_is_shown_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Console, "is_terminal", True)
    with doing("loading a[/b]") as step:
        step("loading c[/d]")  # would be an error of rich


class Clock:
    """Seconds that pass when they are told to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_line_for_each_step_says_what_is_done_and_left() -> None:
    clock, stream = Clock(), io.StringIO()
    with Progress(400_000_000, shown=True, stream=stream, clock=clock) as progress:
        for step in (0, 1):
            for _ in range(2):
                clock.now += 1
                progress.advance(50_000_000, f"layer {step}")
    # The end of a step shows when the next one begins.
    assert stream.getvalue().splitlines() == [
        "layer 0: 100.0 MB of 400.0 MB, 25%, 33.3 MB/s, 9 s left",
        "layer 1: 200.0 MB of 400.0 MB, 50%, 50.0 MB/s, 4 s left",
    ]


def test_from_next_to_nothing_nobody_can_tell_what_is_left() -> None:
    clock, stream = Clock(), io.StringIO()
    with Progress(2_600_000_000, shown=True, stream=stream, clock=clock) as progress:
        for nbytes in (1_000, 100_000_000):
            clock.now += 11
            progress.advance(nbytes, "layer 0")
    assert stream.getvalue().splitlines()[:2] == [
        "layer 0: 0.0 MB of 2.6 GB, 0%, 0.0 MB/s",
        "layer 0: 100.0 MB of 2.6 GB, 4%, 4.5 MB/s, 9 min 10 s left",
    ]


def test_a_long_step_has_a_line_every_ten_seconds() -> None:
    clock, stream = Clock(), io.StringIO()
    with Progress(10_000_000_000, shown=True, stream=stream, clock=clock) as progress:
        for _ in range(35):
            clock.now += 1
            progress.advance(100_000_000, "layer 3")
    lines = stream.getvalue().splitlines()
    assert len(lines) == 35 // EVERY + 1
    assert lines[0] == "layer 3: 1.0 GB of 10.0 GB, 10%, 100.0 MB/s, 1 min 30 s left"


@pytest.mark.parametrize("shown", [None, False])
def test_a_library_is_quiet_where_nobody_looks(shown: bool | None) -> None:
    stream = io.StringIO()
    with Progress(2, shown=shown, stream=stream) as progress:
        progress.advance(1, "a")
        progress.advance(1, "b")
    assert stream.getvalue() == ""


@pytest.mark.parametrize("shown", [None, True])
def test_a_closed_stderr_is_no_fault(
    shown: bool | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    with Progress(2, shown=shown) as progress:
        progress.advance(1, "a")
        progress.advance(1, "b")
    assert capsys.readouterr().out == ""


@pytest.mark.slow
@pytest.mark.parametrize("closed", ["2>&-", "2>&- <&-"])
def test_commands_with_a_display_end_well_with_a_closed_stderr(closed: str, tmp_path: Path) -> None:
    source = made.write(tmp_path / "source")
    command = [sys.executable, "-m", "ktk", "verify", str(source)]
    done = subprocess.run(
        f"{shlex.join(command)} {closed}", shell=True, stdout=subprocess.PIPE, text=True
    )
    assert done.returncode == 0
    assert "nothing is wrong" in done.stdout


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (59.4, "59 s"), (185, "3 min 5 s"), (7800, "2 h 10 min")]
)
def test_times_are_written_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def convert(source: Path, output: Path, *options: str) -> list[str]:
    command = ["convert", str(source), str(output), "--backend", "AMXINT8", *options]
    return [sys.executable, "-m", "ktk", *command]


@pytest.mark.slow
def test_convert_in_a_pipe_prints_a_line_for_each_layer(tmp_path: Path) -> None:
    source = made.write(tmp_path / "source", layers=(0, 1, 2))
    done = subprocess.run(
        convert(source, tmp_path / "packed", "--json"), capture_output=True, text=True, check=True
    )
    lines = [line for line in done.stderr.splitlines() if "left" in line]
    assert [line.split(":")[0] for line in lines] == ["layer 0", "layer 1", "layer 2"]
    assert " 100%, " in lines[-1]
    document = json.loads(done.stdout)
    assert [layer["number"] for layer in document["layers"]] == [0, 1, 2]
    for layer in document["layers"]:
        assert Path(layer["file"]).stat().st_size == layer["nbytes"]
        assert not layer["kept"]


@pytest.mark.slow
def test_convert_on_a_terminal_shows_a_bar(tmp_path: Path) -> None:
    source = made.write(tmp_path / "source")
    ours, theirs = pty.openpty()
    done = subprocess.Popen(convert(source, tmp_path / "packed"), stderr=theirs)
    os.close(theirs)
    said = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:
            break
        if not part:
            break
        said += part
    os.close(ours)
    assert done.wait() == 0
    assert "━".encode() in said
    assert b" left" not in said


@pytest.mark.slow
def test_an_interrupted_conversion_ends_with_130(tmp_path: Path) -> None:
    source = made.write(tmp_path / "source", layers=tuple(range(12)))
    output = tmp_path / "packed"
    process = subprocess.Popen(
        convert(source, output, "--threads", "1"), stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while not list(output.glob("layer-*")) and time.monotonic() < deadline:
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()
    assert process.returncode == 130, said
    assert "stopped; the layers that" in said
    assert "Traceback" not in said
