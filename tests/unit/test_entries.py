"""Entry points are read once, and again when a package came or went."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ktk import entries
from ktk.entries import entry_points

GROUP = "ktk.test_entries"


def install(site: Path, name: str) -> Path:
    made = site / f"{name}-1.0.dist-info"
    made.mkdir()
    (made / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (made / "entry_points.txt").write_text(f"[{GROUP}]\n{name} = {name}:thing\n")
    return made


def make_old(site: Path) -> None:
    past = time.time_ns() - 10 * entries._TICK
    os.utime(site, ns=(past, past))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages, the only one there is, that was last changed some time ago."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(entries, "_read", {})
    install(tmp_path, "first")
    make_old(tmp_path)
    return tmp_path


@pytest.fixture
def scans(site: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Groups whose entry points are read from metadata."""
    seen: list[str] = []
    real = importlib.metadata.entry_points

    def spy(*, group: str) -> Any:
        seen.append(group)
        return real(group=group)

    monkeypatch.setattr(importlib.metadata, "entry_points", spy)
    return seen


def names() -> list[str]:
    return sorted(one.name for one in entry_points(GROUP))


def test_nothing_new_is_read_once(scans: list[str]) -> None:
    assert [names() for _ in range(3)] == [["first"]] * 3
    assert scans == [GROUP]


def test_groups_are_read_apart(scans: list[str]) -> None:
    assert entry_points("ktk.other") == ()
    assert names() == ["first"]
    assert scans == ["ktk.other", GROUP]


def test_what_comes_and_goes_is_seen(site: Path, scans: list[str]) -> None:
    assert names() == ["first"]
    second = install(site, "second")
    assert names() == ["first", "second"]
    shutil.rmtree(second)
    assert names() == ["first"]
    assert len(scans) == 3


def test_a_folder_that_changes_is_not_trusted_within_a_tick(site: Path, scans: list[str]) -> None:
    """A second package in the same tick would leave the same time of change."""
    os.utime(site)
    assert [names(), names()] == [["first"]] * 2
    assert len(scans) == 2
    make_old(site)
    assert [names(), names()] == [["first"]] * 2
    assert len(scans) == 3


def test_another_path_is_read(
    site: Path, scans: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert names() == ["first"]
    (site / "more").mkdir()
    install(site / "more", "third")
    make_old(site)
    assert names() == ["first"]
    monkeypatch.setattr(sys, "path", [*sys.path, str(site / "more"), str(site / "none")])
    assert names() == ["first", "third"]


def test_finders_that_are_no_folders_are_asked_each_time(
    scans: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Finder:
        @staticmethod
        def find_spec(*_: Any) -> None:
            return None

        @staticmethod
        def find_distributions(*_: Any) -> Any:
            return iter(())

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    assert [names(), names()] == [["first"]] * 2
    assert len(scans) == 2
