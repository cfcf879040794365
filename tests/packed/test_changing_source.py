"""A source that changes under a conversion, or before it is resumed, leaves no mixture."""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from pathlib import Path

import checkpoints as made
import pytest

from ktk.checkpoint.packed import PackedCheckpoint
from ktk.checkpoint.packed.folder import file_of
from ktk.checkpoint.packed.layer import open_layer
from ktk.conversion import Conversion, convert
from ktk.errors import CheckpointError

SIZES = (3, 128, 512)
LAYERS = (0, 1, 2)
FILE = "model.safetensors"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Three layers, in one file whose ends do not hold the middle layer."""
    return made.write(tmp_path / "source", layers=LAYERS, sizes=SIZES)


def places(source: Path, layer: int) -> tuple[int, int]:
    """Where the weights of a layer begin and end; names, and so layers, are sorted."""
    data = (source / FILE).read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    each = (len(data) - begin) // len(LAYERS)
    assert each > 1 << 18, "the samples of the fingerprint must not reach the middle"
    return begin + layer * each, begin + (layer + 1) * each


def rewrite(source: Path, layer: int, by: int = 1) -> None:
    """Change weights in the middle of a layer, in place: in mantissas, so that all stay finite."""
    begin, end = places(source, layer)
    with (source / FILE).open("r+b") as file:
        at = (begin + end) // 2 // 2 * 2
        file.seek(at)
        data = bytearray(file.read(4096))
        data[::2] = bytes(byte ^ by for byte in data[::2])
        file.seek(at)
        file.write(data)


def expected(source: Path, folder: Path) -> dict[str, bytes]:
    """Convert what the source holds now."""
    convert(source, folder, backend="AMXINT8")
    return layers(folder)


def layers(folder: Path) -> dict[str, bytes]:
    return {name: data for name, data in made.contents(folder).items() if "layer" in name}


def begun(source: Path, output: Path, finished: int) -> None:
    """Convert some layers, and stop in the middle of the next."""
    with Conversion(source, output, backend="AMXINT8", threads=1) as conversion:
        steps = conversion.run()
        for _ in range(finished * SIZES[0] + 1):
            next(steps)
        steps.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_whose_source_changed_before_resuming_is_made_again(
    source: Path, tmp_path: Path, layer: int, caplog: pytest.LogCaptureFixture
) -> None:
    output = tmp_path / "packed"
    begun(source, output, 2)
    before = layers(output)
    stamps = {name: (output / name).stat().st_mtime_ns for name in before}
    rewrite(source, layer)
    plans = convert(source, output, backend="AMXINT8", resume=True)
    want = expected(source, tmp_path / "new")
    assert layers(output) == want
    again = [n for n in (0, 1) if n == layer]
    assert [plan.encoder.number for plan in plans if plan.done] == [n for n in (0, 1) if n != layer]
    for n in (0, 1):
        name = file_of(output, n).name
        assert ((output / name).stat().st_mtime_ns != stamps[name]) == (n in again)
        assert (before[name] != want[name]) == (n in again), "the test's change changed nothing"
    messages = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert len(messages) == len(again)
    assert all(
        f"layer {n} has to be converted again" in text
        for n, text in zip(again, messages, strict=True)
    )


def test_a_copied_source_keeps_what_is_finished(source: Path, tmp_path: Path) -> None:
    """Times and inodes are others, bytes are not."""
    output = tmp_path / "packed"
    begun(source, output, 2)
    stamps = {path: path.stat().st_mtime_ns for path in output.glob("layer-*")}
    elsewhere = tmp_path / "elsewhere" / "source"
    shutil.copytree(source, elsewhere, copy_function=shutil.copyfile)
    plans = convert(elsewhere, output, backend="AMXINT8", resume=True)
    assert [plan.done for plan in plans] == [True, True, False]
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps
    assert layers(output) == expected(source, tmp_path / "new")


def test_sources_that_stayed_are_not_read_again(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "packed"
    begun(source, output, 2)
    monkeypatch.setattr(Conversion, "_read", lambda *_: lambda: pytest.fail("was read"))
    plans = convert(source, output, backend="AMXINT8", resume=True)
    assert [plan.done for plan in plans] == [True, True, False]


def test_layers_that_were_not_asked_for_are_not_left_of_an_older_source(
    source: Path, tmp_path: Path
) -> None:
    output = tmp_path / "packed"
    begun(source, output, 2)
    rewrite(source, 1)
    convert(source, output, backend="AMXINT8", layers=[2], resume=True)
    assert layers(output) == expected(source, tmp_path / "new")


def test_no_mixture_is_left_if_resuming_is_interrupted(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "packed"
    begun(source, output, 2)
    rewrite(source, 0)
    with Conversion(source, output, backend="AMXINT8", resume=True) as conversion:
        next(conversion.run())
    assert sorted(layers(output)) == ["layer-00001.safetensors"]
    with pytest.raises(CheckpointError, match=r"layer-00000\.safetensors is missing"):
        PackedCheckpoint(output).layer(0)
    # What was noticed is not forgotten with the process that noticed it.
    convert(source, output, backend="AMXINT8", resume=True)
    assert layers(output) == expected(source, tmp_path / "new")


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("experts", [1, 4, 8])
def test_a_change_during_the_conversion_is_named_and_made_good(
    source: Path, tmp_path: Path, layer: int, experts: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether it hits a layer that is finished, the one being read, or one to come."""
    output = tmp_path / "packed"
    with Conversion(source, output, backend="AMXINT8", threads=1) as conversion:
        written = 0
        for step, plan in enumerate(conversion.run(), 1):
            written += plan.nbytes // SIZES[0]
            if step == experts:
                time.sleep(0.02)
                rewrite(source, layer)
        assert conversion.expected == pytest.approx(written, rel=1e-3)
    assert layers(output) == expected(source, tmp_path / "new")
    assert f"{source / FILE} changed while {source} was converted" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
def test_a_thread_that_writes_meanwhile_leaves_no_mixture(
    source: Path, tmp_path: Path, threads: int
) -> None:
    """Several times, at moments of its own."""
    said: list[str] = []
    for turn in range(5):
        stop = threading.Event()

        def write(turn: int = turn, stop: threading.Event = stop) -> None:
            for n in range(3):
                if stop.wait(0.01 + 0.013 * turn):
                    return
                rewrite(source, (turn + n) % len(LAYERS), by=1 + turn)

        writer = threading.Thread(target=write)
        writer.start()
        output = tmp_path / f"packed{turn}"
        try:
            convert(source, output, backend="AMXINT8", threads=threads)
        except CheckpointError as error:
            said.append(str(error))
            stop.set()
            writer.join()
            convert(source, output, backend="AMXINT8", threads=threads, resume=True)
        stop.set()
        writer.join()
        # It may have ended before the last change: then resuming finds that one.
        convert(source, output, backend="AMXINT8", threads=threads, resume=True)
        assert layers(output) == expected(source, tmp_path / f"new{turn}")
    assert all("changed" in text for text in said), said


def test_a_source_that_never_stays_is_refused(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "packed"
    with Conversion(source, output, backend="AMXINT8", threads=1) as conversion:

        def go() -> None:
            for _ in conversion.run():
                os.utime(source / FILE)

        with pytest.raises(CheckpointError, match=f"{FILE} changed while .*; wait until nobody"):
            go()
    assert not layers(output)
    convert(source, output, backend="AMXINT8", resume=True)
    assert layers(output) == expected(source, tmp_path / "new")


def test_another_model_under_the_same_names_is_refused_by_file(
    source: Path, tmp_path: Path
) -> None:
    output = tmp_path / "packed"
    begun(source, output, 1)
    path = source / FILE
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)
    before = made.contents(output)
    with pytest.raises(CheckpointError, match=rf"files were not those of source: {FILE}; choose"):
        convert(source, output, backend="AMXINT8", resume=True)
    assert made.contents(output) == before


def test_files_of_a_writer_that_kept_no_checksum_are_made_again(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the source's stamps say that it is the same."""
    output = tmp_path / "packed"
    begun(source, output, 1)
    whole = open_layer(file_of(output, 0))
    assert whole.header.read is not None
    os.utime(source / FILE)

    real = open_layer

    def without(path: Path) -> object:
        layer = real(path)
        object.__setattr__(layer.header, "read", None)
        return layer

    monkeypatch.setattr("ktk.conversion.resume.open_layer", without)
    plans = convert(source, output, backend="AMXINT8", resume=True)
    assert not any(plan.done for plan in plans)


def test_the_help_says_how_sources_are_told_apart() -> None:
    from typer.testing import CliRunner

    from ktk.cli import app

    said = " ".join(CliRunner().invoke(app, ["convert", "--help"]).output.split())
    assert "its part of INPUT is what it was" in said
    assert "reads INPUT again" in said
