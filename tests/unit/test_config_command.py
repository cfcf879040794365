"""`ktk config`: what is set where, what counts, and what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ktk import settings
from ktk.cli import app
from ktk.errors import SettingError

runner = CliRunner()


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give each test a folder of its own, and no variables."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for key in settings.KEYS.values():
        monkeypatch.delenv(key.variable, raising=False)
    return tmp_path / "ktk" / "config.json"


def run(*arguments: str) -> str:
    result = runner.invoke(app, ["config", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def shown() -> dict[str, tuple[object, str]]:
    document = json.loads(run("--json"))
    return {name: (one["value"], one["source"]) for name, one in document.items()}


def test_nothing_is_set_and_nothing_is_written(file: Path) -> None:
    names = ("backend", "linears", "head", "device", "threads", "models")
    assert shown() == dict.fromkeys(names, (None, "default"))
    assert not file.exists()


def test_a_flag_goes_before_a_variable_before_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    run("threads", "3")
    run("backend", "AMXINT8")
    assert shown()["threads"] == (3, "file")
    assert shown()["backend"] == ("AMXINT8", "file")
    monkeypatch.setenv("KTK_THREADS", "5")
    assert shown()["threads"] == (5, "KTK_THREADS")
    found = settings.setting("threads", 7)
    assert (found.value, found.source) == (7, "flag --threads")
    said = run("threads", "4")
    assert "KTK_THREADS goes before" in said
    monkeypatch.setenv("KTK_THREADS", "")
    assert shown()["threads"] == (4, "file")
    run("threads", "--unset")
    assert shown()["threads"] == (None, "default")
    assert shown()["backend"] == ("AMXINT8", "file")


def test_folders_are_kept_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    run("models", "here", "/there")
    both = [str(tmp_path / "here"), "/there"]
    assert shown()["models"] == (both, "file")
    assert run("models") == f"{both[0]} /there\n"
    monkeypatch.setenv("KTK_MODELS", os.pathsep.join(["~/x", "/y"]))
    assert settings.setting("models").value == [str(Path.home() / "x"), "/y"]


def test_a_variable_of_one_word_may_have_a_colon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KTK_DEVICE", "cuda:1")
    assert shown()["device"] == ("cuda:1", "KTK_DEVICE")


def test_the_table_says_what_counts_and_where_the_file_is(file: Path) -> None:
    run("threads", "3")
    text = run()
    [line] = [line for line in text.splitlines() if line.split()[:1] == ["threads"]]
    assert line.split()[1:3] == ["3", "file"]
    assert str(file) in text.replace("\n", "")


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (
            ["thread", "3"],
            "head, device, threads, models. Did you mean 'threads'?",
        ),
        (["threads", "900000"], "900000 threads are more than a machine with"),
        (["threads", "0"], "threads must be a number from 1 to 1000000, got 0"),
        (["threads", "many"], "threads must be a number from 1 to 1000000, got 'many'"),
        (["threads", "1", "2"], "threads must be one word, got '1 2'"),
        (["backend", "AMXINT88"], "no backend 'AMXINT88'"),
        (["threads", "3", "--unset"], "--unset takes threads out of the file"),
        (["--unset"], "--unset needs the name"),
    ],
)
def test_what_cannot_be_set_is_refused(arguments: list[str], what: str, file: Path) -> None:
    result = runner.invoke(app, ["config", *arguments])
    assert what in str(result.exception)
    assert not file.exists()


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('{"threads": "3"}', "threads must be a number from 1 to 1000000, got '3'"),
        ('{"threads": true}', "threads must be a number from 1 to 1000000, got True"),
        ('{"threads": 3', "cannot be read"),
        ("[3]", "holds no table"),
        ("[" * 100_000, "cannot be read"),
    ],
)
def test_a_wrong_file_is_named(file: Path, text: str, what: str) -> None:
    file.parent.mkdir()
    file.write_text(text)
    with pytest.raises(SettingError) as caught:
        settings.setting("threads")
    assert str(caught.value).startswith(str(file))
    assert what in str(caught.value)
    # A value on the command line needs no file.
    assert settings.setting("threads", 2).value == 2


def test_a_file_is_mended_by_the_command(file: Path) -> None:
    file.parent.mkdir()
    file.write_text('{"thread": 3, "models": "/m", "threads": "four", "backend": "AMXINT8"}')
    result = runner.invoke(app, ["config"], catch_exceptions=False)
    assert result.exit_code == 0
    for sentence in (
        "there is no setting 'thread'; there are backend, linears, head",
        "Did you mean 'threads'?; ktk config thread --unset takes it out",
        "models must be a list of folders, got '/m'; ktk config models --unset takes it out",
        "threads must be a number from 1 to 1000000, got 'four'",
    ):
        assert sentence in result.stderr
    run("threads", "2")
    run("thread", "--unset")
    run("models", "--unset")
    assert json.loads(file.read_text()) == {"backend": "AMXINT8", "threads": 2}
    assert run() != ""
    result = runner.invoke(app, ["config", "thread", "--unset"])
    assert "there is no setting 'thread'" in str(result.exception)


def test_entries_that_mean_nothing_hinder_nobody_else(file: Path) -> None:
    """One of a newer ktk, say."""
    file.parent.mkdir()
    file.write_text('{"thread": 3, "models": "/m", "threads": 4}')
    with pytest.warns(UserWarning, match="there is no setting 'thread'.*it counts for nothing"):
        assert settings.setting("threads").value == 4


def test_a_file_is_replaced_as_a_whole(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("threads", "3")

    def fail(*_: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(SettingError, match="cannot be written: no space"):
        settings.save("threads", ["4"])
    monkeypatch.undo()
    assert json.loads(file.read_text()) == {"threads": 3}
    assert sorted(path.name for path in file.parent.iterdir()) == [".ktk.lock", "config.json"]


def test_a_file_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(settings, "config_file", lambda: tmp_path / "file" / "ktk" / "config.json")
    with pytest.raises(SettingError, match=r"cannot be written: Not a directory\. The var"):
        settings.save("backend", ["BF16"])


def test_a_link_stays_one(file: Path, tmp_path: Path) -> None:
    """As those who keep such files in one place make it."""
    kept = tmp_path / "kept" / "ktk.json"
    file.parent.mkdir()
    file.symlink_to(kept)
    run("backend", "BF16")
    assert file.is_symlink()
    assert json.loads(kept.read_text()) == {"backend": "BF16"}
