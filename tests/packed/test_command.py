"""`ktk convert` says what it does and refuses what makes no sense."""

from __future__ import annotations

from pathlib import Path

import checkpoints as made
import pytest
from checkpoints import BLOCKS
from typer.testing import CliRunner

from ktk.cli import app
from ktk.cli.convert import parse_layers
from ktk.conversion import convert
from ktk.errors import BackendNotFound, CheckpointError

runner = CliRunner()


@pytest.mark.parametrize(
    ("text", "layers"),
    [("3", [3]), ("0-3,5", [0, 1, 2, 3, 5]), ("7, 2-3,3", [2, 3, 7]), ("10-10", [10])],
)
def test_layers_are_numbers_and_ranges(text: str, layers: list[int]) -> None:
    assert parse_layers(text) == layers


@pytest.mark.parametrize("text", ["", "a", "3-1", "1,,2", "-1", "1-2-3", "0x1", "0-1000000000000"])
def test_other_layers_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no layer and no range of layers such as 0-3"):
        parse_layers(text)
    result = runner.invoke(app, ["convert", "in", "out", "--backend", "BF16", "--layers", text])
    assert result.exit_code == 2
    assert not Path("out").exists()


@pytest.mark.parametrize("threads", [-1, 0])
def test_less_than_one_thread_is_refused(tmp_path: Path, threads: int) -> None:
    source, output = made.write(tmp_path / "source"), tmp_path / "packed"
    with pytest.raises(ValueError, match=f"^threads must be at least 1, got {threads}$"):
        convert(source, output, backend="AMXINT8", threads=threads)
    assert not output.exists()


def test_no_layers_are_not_all_layers(tmp_path: Path) -> None:
    source, output = made.write(tmp_path / "source"), tmp_path / "packed"
    with pytest.raises(ValueError, match="layers is empty: expected at least one layer, or None"):
        convert(source, output, backend="AMXINT8", layers=[])
    assert not output.exists()


@pytest.mark.parametrize(
    ("option", "value"), [("--threads", "-1"), ("--threads", "0"), ("--group-size", "-1")]
)
def test_numbers_that_make_no_sense_are_refused_by_name(option: str, value: str) -> None:
    result = runner.invoke(app, ["convert", "in", "out", "--backend", "BF16", option, value])
    assert result.exit_code == 2
    assert f"Invalid value for '{option}'" in result.output


def test_it_says_what_becomes_of_which_layers(tmp_path: Path) -> None:
    source = made.write(tmp_path / "source", BLOCKS, layers=(0, 1, 2, 3))
    output = tmp_path / "packed"
    arguments = ["convert", str(source), str(output), "--backend", "AMXINT8"]
    first = runner.invoke(app, [*arguments, "--layers", "0-1", "--threads", "1"])
    assert first.exit_code == 0, first.output
    said = " ".join(first.output.split())
    assert "layers 0-1: decoded to f32 and quantised by AMXINT8; i8 with f32 scales" in said
    assert "1.2 MB to write" in said
    second = runner.invoke(app, [*arguments, "--resume"])
    assert second.exit_code == 0, second.output
    said = " ".join(second.output.split())
    assert "looking at what" in said
    assert "layers 0-1 are there already" in said
    assert "layers 2-3: decoded" in said
    assert "2.4 MB in 4 layers" in said
    convert(source, tmp_path / "expected", backend="AMXINT8")
    assert made.contents(output) == made.contents(tmp_path / "expected")


def test_an_activation_is_that_of_all_layers(tmp_path: Path) -> None:
    source, output = made.write(tmp_path / "source", layers=(0, 1)), tmp_path / "packed"
    arguments = ["convert", str(source), str(output), "--backend", "AMXINT8", "--layers"]
    assert runner.invoke(app, [*arguments, "0"]).exit_code == 0
    with pytest.raises(CheckpointError, match="begun with the activation None, not gelu: leave"):
        convert(source, output, backend="AMXINT8", layers=[1], resume=True, activation="gelu")
    assert runner.invoke(app, [*arguments, "1", "--resume"]).exit_code == 0


def test_groups_are_passed_on(tmp_path: Path) -> None:
    source = made.write(tmp_path / "source")
    arguments = ["convert", str(source), str(tmp_path / "packed"), "--backend", "AMXINT4"]
    assert runner.invoke(app, [*arguments, "--group-size", "32"]).exit_code == 0
    convert(source, tmp_path / "expected", backend="AMXINT4", group_size=32)
    assert made.contents(tmp_path / "packed") == made.contents(tmp_path / "expected")


def test_errors_are_those_of_ktk(tmp_path: Path) -> None:
    source = made.write(tmp_path / "source")
    result = runner.invoke(
        app, ["convert", str(source), str(tmp_path / "o"), "--backend", "AMXINT"]
    )
    assert isinstance(result.exception, BackendNotFound)
    result = runner.invoke(
        app, ["convert", str(source), "/proc/none", "--backend", "AMXINT8", "--layers", "0"]
    )
    assert isinstance(result.exception, CheckpointError)
    assert "/proc/none cannot be written" in str(result.exception)
