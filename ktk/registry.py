"""Finds backends through entry points and loads them when they are asked for.

Listing reads package metadata and imports nothing, so a broken plug-in cannot harm anyone who does
not name it. The backends that come with ktk take the same path as everyone else's.
"""

from __future__ import annotations

import difflib
import operator
import os
import re
import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint
from typing import NamedTuple, NoReturn

from ktk import _core
from ktk.backend import Backend, BackendInfo
from ktk.entries import entry_points
from ktk.errors import (
    BackendConflict,
    BackendError,
    BackendImportError,
    BackendIncompatible,
    BackendNotFound,
    BackendUnsupported,
)
from ktk.names import ALIASES, EXAMPLE, Alias, find_alias

GROUP = "ktk.backends"


@dataclass(frozen=True)
class _Failure:
    """Why a backend did not load, kept so that asking again gives the same answer."""

    error: BackendError

    def raise_again(self) -> NoReturn:
        # A new exception each time: re-raising one object would grow its traceback for ever.
        error = self.error
        again = type(error)(str(error), brief=error.brief, advice=error.advice)
        raise again from error.__cause__


_lock = threading.RLock()


def _forget_lock() -> None:
    """In a forked child: a thread of the parent may have held the lock."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_forget_lock)
_opened: dict[tuple[str, str, str], Backend | _Failure] = {}


class _Known(NamedTuple):
    """Providers, and what they were found from."""

    entries: tuple[EntryPoint, ...]
    built: frozenset[str] | None
    providers: dict[str, list[BackendInfo]]


_known: _Known | None = None


def backends() -> dict[str, BackendInfo]:
    """List the installed backends by name, from package metadata only.

    Returns
    -------
    dict[str, BackendInfo]
        Sorted by name. Where several distributions provide the same name, the first of them in
        alphabetical order is shown and the others are its `rivals`.
    """
    return {name: infos[0] for name, infos in _providers().items()}


def load_backend(name: str, *, distribution: str | None = None) -> Backend:
    """Import a backend, check that it fits this ktk and this CPU, and return it.

    Parameters
    ----------
    name
        One of `backends()`, or an alias of one (`ktk.names`), in capitals or small letters.
    distribution
        The package to take it from; needed only where several provide the name.

    Returns
    -------
    Backend
        The same object each time.

    Raises
    ------
    BackendNotFound, BackendConflict, BackendImportError, BackendIncompatible, BackendUnsupported
        All are `BackendError`. A failure is remembered and raised again with the same message, but
        for an ImportError of the backend's module, which is tried again.
    TypeError
        The name is no str.
    """
    info = find_backend(name, distribution=distribution)
    backend = open_backend(info)
    check_runnable(backend)
    return backend


def check_runnable(backend: Backend) -> None:
    """Raise BackendUnsupported where this CPU can run none of the variants.

    And a SettingError for a variable of ktk that says nonsense, before anything is computed.
    """
    _core.prefetch()
    variants = backend.variants
    if any(variant.runnable for variant in variants):
        return
    needs = "; ".join(f"{one.name} needs {', '.join(one.missing_isa)}" for one in variants)
    raise BackendUnsupported(
        f"backend {backend.info} cannot run here, because this CPU lacks instruction sets: {needs}",
        # The last variant asks for least.
        brief=f"needs {', '.join(variants[-1].missing_isa)}, which this CPU lacks",
    )


def find_backend(name: str, *, distribution: str | None = None) -> BackendInfo:
    """Return the one installed backend that is meant, or say why there is not exactly one."""
    providers = _providers()
    name = _resolve(name, providers)
    infos = providers[name]
    if distribution is not None:
        infos = [info for info in infos if _same(info.distribution, distribution)]
        if not infos:
            found = ", ".join(info.distribution for info in providers[name])
            raise BackendNotFound(
                f"distribution {distribution!r} provides no backend {name!r}; it is provided by "
                f"{found}"
            )
    if len(infos) > 1:
        raise BackendConflict(
            f"backend {name!r} is provided by {_and([_origin(info) for info in infos])}; "
            f"choose with load_backend({name!r}, distribution={infos[0].distribution!r}), or "
            "uninstall one",
            brief="is provided by several packages",
        )
    return infos[0]


def aliases() -> dict[str, str]:
    """Return the aliases that mean something here, with the backend that each stands for.

    Backends are loaded where an alias stands for one of several, of which some may not run here.
    """
    providers = _providers()
    usable = _usable(providers)
    targets = {name: _target(alias, usable) for name, alias in ALIASES.items()}
    return {
        name: target
        for name, target in targets.items()
        if target is not None and name not in providers
    }


def _usable(providers: Mapping[str, list[BackendInfo]]) -> list[str]:
    """Return the backends that are part of some build."""
    return [name for name, infos in providers.items() if any(info.built for info in infos)]


def _target(alias: Alias, usable: Collection[str]) -> str | None:
    """Return the first backend that an alias stands for and that can run here, else the last."""
    names = [name for name in alias.backends if name in usable]
    return next((name for name in names[:-1] if _can_run(name)), names[-1] if names else None)


def _can_run(name: str) -> bool:
    """Whether nothing is missing on this machine. A backend that is broken should say so itself."""
    try:
        load_backend(name)
    except BackendUnsupported:
        return False
    except BackendError:
        return True
    return True


def _resolve(name: str, providers: Mapping[str, list[BackendInfo]]) -> str:
    """Return the registered name that is meant; one that is registered wins over an alias."""
    if not isinstance(name, str):
        raise TypeError(
            f"a backend is loaded by its name, a str such as {EXAMPLE!r}, got {type(name).__name__}"
        )
    if name in providers:
        return name
    in_other_case = [known for known in providers if known.casefold() == name.casefold()]
    if len(in_other_case) == 1:
        return in_other_case[0]
    alias = find_alias(name, providers)
    target = _target(alias, _usable(providers)) if alias else None
    if target is None:
        raise BackendNotFound(_not_found(name, list(providers)), brief="is not installed")
    return target


def open_backend(info: BackendInfo) -> Backend:
    """Import and wrap a backend even if this CPU can run none of its variants."""
    key = (info.name, info.distribution, info.value)
    with _lock:
        if key not in _opened:
            try:
                _opened[key] = _open(info)
            except BackendError as error:
                if isinstance(error.__cause__, ImportError):
                    raise  # memory for its library, or what it needs, may be there the next time
                _opened[key] = _Failure(error.with_traceback(None))
        opened = _opened[key]
    if isinstance(opened, _Failure):
        opened.raise_again()
    return opened


def providers() -> list[BackendInfo]:
    """List every provider of every name, rivals included."""
    return [info for infos in _providers().values() for info in infos]


def _open(info: BackendInfo) -> Backend:
    if not info.built:
        raise _not_built(info)
    assert info.entry is not None
    # A plug-in may raise anything, and one that calls sys.exit() must not end its user's program.
    try:
        plugin = info.entry.load()
        capsule = plugin.__ktk_backend__()
        library = plugin.__ktk_library__() if hasattr(plugin, "__ktk_library__") else None
    except MemoryError:  # says nothing of the backend
        raise
    except BackendUnsupported as error:
        message = f"backend {info} cannot run here: {error}"
        raise BackendUnsupported(message, brief=error.brief, advice=error.advice) from error
    except (Exception, SystemExit) as error:
        raise _failed(info, error) from error
    try:
        core = _core.Backend(capsule)
    except _core.AbiError as error:
        remedy = _remedy(info, error)
        raise BackendIncompatible(
            f"backend {info} {error}; {remedy}",
            brief="is built for another version of ktk's interface for backends",
            advice=remedy,
        ) from error
    except MemoryError:
        raise
    except Exception as error:
        raise _failed(info, error) from error
    return Backend(core, info, library)


def _providers() -> Mapping[str, list[BackendInfo]]:
    """Return who provides each name, with packages installed meanwhile.

    Asking a package for its name and version reads a file of its metadata, so what was found is
    kept for as long as the same entry points are there.
    """
    global _known
    entries = tuple(entry_points(group=GROUP))
    built = _built()
    known = _known
    same = known is not None and len(known.entries) == len(entries) and known.built == built
    # Entry points that are equal may be of two packages.
    if known is None or not same or any(map(operator.is_not, known.entries, entries)):
        _known = known = _Known(entries, built, _found(entries, built))
    return known.providers


def _found(
    entries: Iterable[EntryPoint], built: frozenset[str] | None
) -> dict[str, list[BackendInfo]]:
    found: dict[str, list[BackendInfo]] = {}
    for entry in entries:
        dist = entry.dist
        info = BackendInfo(
            name=entry.name,
            # A package whose metadata somebody deleted has no name.
            distribution=(dist and dist.name) or "(unknown)",
            version=(dist and dist.version) or "(unknown)",
            value=entry.value,
            built=_is_built(entry.value, built),
            entry=entry,
        )
        found.setdefault(entry.name, []).append(info)
    return {name: _with_rivals(found[name]) for name in sorted(found)}


def _with_rivals(infos: list[BackendInfo]) -> list[BackendInfo]:
    infos = sorted(infos, key=lambda info: (info.distribution, info.value))
    return [
        replace(info, rivals=tuple(other.distribution for other in infos if other is not info))
        for info in infos
    ]


def _built() -> frozenset[str] | None:
    """Return the modules of `ktk._backends` that this build has; None where it does not say."""
    try:
        from ktk._backends._built import MODULES
    except ImportError:
        return None
    return frozenset(MODULES)


def _is_built(value: str, built: frozenset[str] | None) -> bool:
    package = value.partition(":")[0].rpartition(".")[0]
    return built is None or package != "ktk._backends" or _module(value) in built


def _module(value: str) -> str:
    """Return the last name of the module that the value of an entry point names."""
    return value.partition(":")[0].rpartition(".")[2]


def _not_built(info: BackendInfo) -> BackendError:
    """Say why a backend is not part of this build."""
    from ktk._backends._built import ARCHITECTURE, ELSEWHERE

    if needs := ELSEWHERE.get(_module(info.value)):
        return BackendUnsupported(
            f"backend {info.name!r} needs an {needs} processor; this ktk {info.version} is built "
            f"for {ARCHITECTURE}",
            brief=f"needs an {needs} processor",
        )
    return BackendNotFound(
        f"backend {info.name!r} is not part of this build of ktk {info.version}; rebuild ktk from "
        "source",
        brief="is not part of this build of ktk",
        advice="rebuild ktk from source",
    )


def _not_found(name: str, names: list[str]) -> str:
    known = aliases()
    what = hint = ""
    if alias := ALIASES.get(name.upper()):
        what = f", which is an alias of {' or '.join(alias.backends)}"
    elif close := _slips(name, [*known, *names]):
        also = {one: f" (an alias of {known[one]})" for one in close if one in known}
        hint = f". Did you mean {' or '.join(repr(one) + also.get(one, '') for one in close)}?"
    return f"no backend {name!r}{what}; installed: {', '.join(names) or 'none'}{hint}"


def _slips(name: str, known: Collection[str]) -> list[str]:
    """Return the names that differ by a slip of the finger.

    MXFP4 is no slip of NVFP4, nor AMXINT6 one of AMXINT4: a format's name is as short as that. So
    digits have to be the same, if there are any, and of five letters four.
    """
    digits = re.findall(r"\d+", name)
    by_folded = {
        one.casefold(): one for one in known if not digits or re.findall(r"\d+", one) == digits
    }
    close = difflib.get_close_matches(name.casefold(), by_folded, n=2, cutoff=0.8)
    return [by_folded[one] for one in close]


def _failed(info: BackendInfo, error: BaseException) -> BackendImportError:
    kind, package = type(error).__name__, info.distribution
    where = f" ({info.value})" if package else ""
    return BackendImportError(
        f"backend {info}{where} failed to load: {kind}: {error}",
        brief=f"fails to load ({kind})",
        advice=f"reinstall {package}, or uninstall it if it is not needed" if package else "",
    )


def _remedy(info: BackendInfo, error: Exception) -> str:
    """Say who is behind. The error names the backend's version of the ABI first."""
    theirs = re.search(r"ABI (\d+)", str(error))
    is_newer = theirs and int(theirs[1]) > _core.ABI[0]
    if not info.distribution:
        return f"{'upgrade ktk, or ' if is_newer else ''}build it with the abi.h of this ktk"
    if is_newer:
        return f"upgrade ktk, or install an older {info.distribution}"
    return f"upgrade {info.distribution}, or ask its authors to build it for this ktk"


def _origin(info: BackendInfo) -> str:
    return f"{info.distribution} {info.version}"


def _and(parts: list[str]) -> str:
    return ", ".join(parts[:-1]) + " and " + parts[-1]


def _same(first: str, second: str) -> bool:
    """Compare names of distributions as package indexes do."""
    return _normal(first) == _normal(second)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
