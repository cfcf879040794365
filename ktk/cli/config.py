"""`ktk config`: shows what is set and where, and sets it."""

from __future__ import annotations

import json
import os
import warnings
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape

from ktk.errors import SettingError
from ktk.settings import FILE, KEYS, Setting, config_file, faults, find_key, save, setting
from ktk.terminal import plain_table


def run_config(key: str | None, words: list[str], *, unset: bool, as_json: bool) -> None:
    """Set or unset a key if that is asked for, and print it; without a key print all of them."""
    if key is None:
        if unset:
            raise SettingError(f"--unset needs the name of a setting: {', '.join(KEYS)}")
        wrong = faults()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of entries that are listed below
            found = [one for name in KEYS if (one := _unless_wrong(name))]
        _show(found, as_json=as_json)
        for name, fault in wrong.items():
            typer.echo(f"ktk: {fault}; ktk config {name} --unset takes it out", err=True)
        return
    if unset and words:
        raise SettingError(f"--unset takes {key} out of the file, and no value")
    if unset:
        save(key, None)
        if as_json and key in KEYS:
            _show([setting(key)], as_json=True)
        return
    name = find_key(key).name
    if words:
        _check(name, words)
        save(name, words)
    now = setting(name)
    if as_json:
        _show([now], as_json=True)
    elif not words:
        typer.echo(_text(now))
    elif words and now.source != FILE:
        typer.echo(f"{name} is in {config_file()} now, but {now.source} goes before it")


def _unless_wrong(name: str) -> Setting | None:
    """Return a setting; None where what is set means nothing, as an entry of the file may."""
    try:
        return setting(name)
    except SettingError:
        if os.environ.get(KEYS[name].variable):
            raise
        return None


def _check(name: str, words: list[str]) -> None:
    """Refuse now what every later command would refuse."""
    if name in ("backend", "linears", "head") and len(words) == 1:
        from ktk.registry import find_backend

        find_backend(words[0])
    if name == "threads" and len(words) == 1 and words[0].isdecimal():
        from ktk._core import WorkerPool

        WorkerPool(int(words[0]))


def _show(found: list[Setting], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({one.key.name: _document(one) for one in found}, indent=2))
        return
    table = plain_table()
    for heading in ("setting", "value", "from", "decides", "variable"):
        table.add_column(heading, overflow="fold")
    for one in found:
        key = one.key
        value = escape(_text(one)) if one.value is not None else f"[dim]{key.default}[/]"
        table.add_row(key.name, value, escape(one.source), key.help, key.variable)
    console = Console(highlight=False)
    console.print(table)
    console.print(f"file: {escape(str(config_file()))}", soft_wrap=True)
    console.print("ktk config NAME VALUE sets one there, ktk config NAME --unset takes it out.")


def _document(one: Setting) -> dict[str, Any]:
    return {"value": one.value, "source": one.source, "variable": one.key.variable}


def _text(one: Setting) -> str:
    """Write a value as the command line takes it; nothing where nobody has set it."""
    value = one.value
    return " ".join(value) if isinstance(value, list) else str(value) if value is not None else ""
