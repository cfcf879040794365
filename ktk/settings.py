"""What the user has set once for all commands, and where: by a flag, a variable, or `ktk config`.

The first of these that says something counts. The file is JSON, in the folder that the platform
has for it: ~/.config/ktk/config.json.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ktk.durable import locked, write_file
from ktk.errors import SettingError

# No configuration is a tenth of that; another file under its name should not fill memory.
_MOST = 1 << 20
# Of threads: above any machine; what this one has use for, its pool says.
_MOST_COUNT = 1_000_000
#: The source of what `ktk config` wrote.
FILE = "file"


@dataclass(frozen=True)
class Key:
    """Something that can be set.

    Attributes
    ----------
    name
        In the file, and of the flag.
    variable
        Of the environment.
    help
        What it decides.
    default
        What holds where nobody has set it, for people.
    parse
        Makes the value of the words of a command line. A list is all of them, and in a variable
        what stands between colons; any other value is one word.
    check
        Returns a value as it is to be kept; ValueError says what is expected instead.
    """

    name: str
    variable: str
    help: str
    default: str
    parse: Callable[[list[str]], Any]
    check: Callable[[Any], Any]


@dataclass(frozen=True)
class Setting:
    """The value of a key, None where nobody has set it, and where that comes from, for people."""

    key: Key
    value: Any = None
    source: str = "default"


def _one(words: list[str]) -> str:
    if len(words) != 1:
        raise ValueError(f"must be one word, got {' '.join(words)!r}")
    return words[0]


def _number(words: list[str]) -> Any:
    text = _one(words)
    return int(text) if text.isdecimal() else text


def _name(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"must be the name of a backend, got {value!r}; ktk backends lists them")
    return value


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MOST_COUNT:
        raise ValueError(f"must be a number from 1 to {_MOST_COUNT}, got {value!r}")
    return value


def _device(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"cpu|cuda(:\d+)?", value):
        raise ValueError(f"must be cpu, cuda, or a GPU such as cuda:1, got {value!r}")
    return value


def _folders(value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(one, str) and one for one in value):
        raise ValueError(f"must be a list of folders, got {value!r}")
    # A shell expands no ~ behind a colon, and later commands run in other folders.
    return [os.path.abspath(os.path.expanduser(one)) for one in value]


KEYS: Mapping[str, Key] = {
    key.name: key
    for key in (
        Key(
            "backend",
            "KTK_BACKEND",
            "computes the experts",
            "as the format decides",
            _one,
            _name,
        ),
        Key(
            "linears",
            "KTK_LINEARS",
            "computes dense layers: a backend's name",
            "as in the files",
            _one,
            _name,
        ),
        Key(
            "head",
            "KTK_HEAD",
            "computes the output head: a backend's name",
            "as in the files",
            _one,
            _name,
        ),
        Key(
            "device",
            "KTK_DEVICE",
            "has all but the experts",
            "cpu",
            _one,
            _device,
        ),
        Key(
            "threads",
            "KTK_THREADS",
            "compute",
            "one per physical core",
            _number,
            _count,
        ),
        Key(
            "models",
            "KTK_MODELS",
            "hold models, besides the hub's cache",
            "none",
            list,
            _folders,
        ),
    )
}


def config_file() -> Path:
    """Return where `ktk config` writes; the file need not be there."""
    from platformdirs import user_config_path

    return user_config_path("ktk", appauthor=False) / "config.json"


def setting(name: str, flag: Any = None) -> Setting:
    """Return the value of a key.

    Parameters
    ----------
    name
        One of `KEYS`.
    flag
        What the command line says; None where it says nothing.

    Raises
    ------
    SettingError
        A value is none for this key; the message says where it stands. Or the file cannot be read.
    """
    key = KEYS[name]
    if flag is not None:
        return Setting(key, _checked(key, flag, f"--{name}"), f"flag --{name}")
    if text := os.environ.get(key.variable):
        words = text.split(os.pathsep) if key.parse is list else [text]
        value = _parsed(key, words, key.variable)
        return Setting(key, value, key.variable)
    stored = _read()
    for other in stored.keys() - KEYS.keys():
        warnings.warn(
            f"{_unknown(other, f'{config_file()}: ')}: it counts for nothing", stacklevel=2
        )
    if name in stored:
        return Setting(key, _checked(key, stored[name], f"{config_file()}: {name}"), FILE)
    return Setting(key)


def faults() -> dict[str, str]:
    """Return the entries of the file that mean nothing by their names, with what is wrong.

    Raises
    ------
    SettingError
        The file cannot be read.
    """
    found = {}
    for name, value in _read().items():
        where = f"{config_file()}: "
        try:
            _checked(find_key(name, where), value, f"{where}{name}")
        except SettingError as error:
            found[name] = str(error)
    return found


def save(name: str, words: list[str] | None) -> None:
    """Set a key in the file, or take it out of there.

    Parameters
    ----------
    name
        One of `KEYS`; to be taken out, any that is in the file.
    words
        Of the command line; None takes the key out. What else the file has stays, even where it
        means nothing.

    Raises
    ------
    SettingError
        There is no such key, the words make no value of it, or the file cannot be written.
    CheckpointError
        Another process is writing the file.
    """
    value = None if words is None else _parsed(find_key(name), words, name)
    path = config_file().resolve()  # which may be a link, to where somebody keeps such files
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.parent):
            stored = _read()
            if value is None and name not in stored:
                find_key(name)
            stored[name] = value
            order = [*KEYS, *(one for one in stored if one not in KEYS)]
            kept = {one: stored[one] for one in order if stored.get(one) is not None}
            write_file(path, (json.dumps(kept, indent=2) + "\n").encode())
    except OSError as error:
        raise SettingError(
            f"{path} cannot be written: {error.strerror or error}. The variables that ktk config "
            "lists set the same without a file"
        ) from error


def find_key(name: str, where: str = "") -> Key:
    """Return a key by its name; SettingError with what may be meant where there is none."""
    if name in KEYS:
        return KEYS[name]
    raise SettingError(_unknown(name, where))


def _unknown(name: str, where: str) -> str:
    close = difflib.get_close_matches(name, KEYS, n=1)
    hint = f". Did you mean {close[0]!r}?" if close else ""
    return f"{where}there is no setting {name!r}; there are {', '.join(KEYS)}{hint}"


def _read() -> dict[str, Any]:
    path = config_file()
    try:
        with path.open("rb") as file:
            text = file.read(_MOST + 1)
        document = json.loads(text)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise SettingError(f"{path} cannot be read: {error}. Mend it, or remove it") from None
    if not isinstance(document, dict):
        raise SettingError(f"{path} holds no table of settings: mend it, or remove it")
    return document


def _parsed(key: Key, words: list[str], where: str) -> Any:
    try:
        value = key.parse(words)
    except ValueError as error:
        raise SettingError(f"{where} {error}") from None
    return _checked(key, value, where)


def _checked(key: Key, value: Any, where: str) -> Any:
    try:
        return key.check(value)
    except ValueError as error:
        raise SettingError(f"{where} {error}") from None
