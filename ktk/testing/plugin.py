"""pytest plugin: one test per property, backend and variant.

Loaded with ``-p ktk.testing.plugin``, and not through a ``pytest11`` entry point, which would put
it into every pytest run of the environment.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, Verbosity, settings

import ktk
from ktk import registry
from ktk.errors import BackendError, BackendUnsupported
from ktk.testing import BACKEND, LAYER, isolation, strategies
from ktk.testing.subject import Subject

PROFILES: dict[str, dict[str, Any]] = {
    "dev": {"max_examples": 25},
    "ci": {"max_examples": 100, "derandomize": True},
    "nightly": {"max_examples": 2000, "print_blob": True},
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the kit."""
    group = parser.getgroup("ktk", "conformance of ktk backends")
    group.addoption(
        "--ktk-backend",
        action="append",
        metavar="NAME",
        help="backend to test, by name or as module:object (default: every one installed)",
    )
    group.addoption(
        "--ktk-variant",
        action="append",
        metavar="VARIANT",
        help="variant to test (default: every one that can run here)",
    )
    group.addoption("--ktk-profile", choices=sorted(PROFILES), default="dev")
    group.addoption(
        "--ktk-examples", type=int, metavar="N", help="examples of each property, over the profile"
    )
    group.addoption(
        "--ktk-no-shrink", action="store_true", help="report the first failing example as it is"
    )
    group.addoption(
        "--ktk-no-isolation",
        action="store_true",
        help="run all properties in one process, for debuggers: a crash then ends the kit",
    )
    group.addoption(
        "--ktk-time-limit",
        type=float,
        default=60,
        metavar="SECONDS",
        help="what one example may take before its property counts as endless (default: 60)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Load the Hypothesis profile, and the backends that were asked for: these have to load."""
    try:
        for name in config.getoption("--ktk-backend") or ():
            load(name)
    except BackendError as error:
        raise pytest.UsageError(str(error)) from error
    _check_variants(config)
    chosen = dict(PROFILES[config.getoption("--ktk-profile")])
    if examples := config.getoption("--ktk-examples"):
        chosen["max_examples"] = examples
    if config.getoption("--ktk-no-shrink"):
        chosen["phases"] = [Phase.explicit, Phase.generate]
    if _isolates(config):  # which hears of each example
        chosen["verbosity"] = Verbosity.verbose
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]
    settings.register_profile("ktk", deadline=None, suppress_health_check=slow, **chosen)
    settings.load_profile("ktk")


def _check_variants(config: pytest.Config) -> None:
    """Refuse the name of a variant that no chosen backend has: nothing would be tested."""
    wanted = config.getoption("--ktk-variant") or ()
    backends = [_loaded(name) for name in (_chosen(config) if wanted else ())]
    if None in backends:
        return  # one that cannot run here, whose variants nobody knows
    names = dict.fromkeys(
        variant.name for backend in backends if backend for variant in backend.variants
    )
    for name in wanted:
        if name not in names:
            raise pytest.UsageError(f"there is no variant {name!r}; there are {', '.join(names)}")


def _chosen(config: pytest.Config) -> Iterable[str]:
    return config.getoption("--ktk-backend") or ktk.backends()


def _loaded(name: str) -> ktk.Backend | None:
    """Load a backend, if it can run here."""
    try:
        return load(name)
    except BackendUnsupported:
        return None


def _is_importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name.partition(":")[0]) is not None
    except ModuleNotFoundError:
        return False


@functools.cache
def load(name: str) -> ktk.Backend:
    """Load a backend by its name, or by the value of an entry point."""
    if name in ktk.backends() or not _is_importable(name):
        return ktk.load_backend(name)
    entry = importlib.metadata.EntryPoint(name=name, value=name, group=registry.GROUP)
    label = name.rpartition(":")[2]
    info = ktk.BackendInfo(label, "", "", name, entry=entry)
    return registry.open_backend(info)


def subjects(config: pytest.Config) -> Iterator[Any]:
    """Yield a parameter for each backend and variant; those that cannot run are skipped."""
    wanted = config.getoption("--ktk-variant")
    for name in _chosen(config):
        try:
            backend = load(name)
        except BackendUnsupported as error:
            yield pytest.param(None, id=name, marks=pytest.mark.skip(reason=str(error)))
            continue
        for variant in backend.variants:
            if wanted and variant.name not in wanted:
                continue
            marks = []
            if not variant.runnable:
                reason = f"this machine lacks {', '.join(variant.missing_isa)}"
                marks = [pytest.mark.skip(reason=reason)]
            subject = Subject(backend, variant)
            yield pytest.param(subject, id=f"{backend.name}-{variant.name}", marks=marks)


def with_conversions(config: pytest.Config, only_kept: bool) -> Iterator[Any]:
    """Yield a parameter for each backend, variant and conversion of weights."""
    for one in subjects(config):
        (subject,) = one.values
        if subject is None:  # cannot run here
            yield pytest.param(None, None, id=one.id, marks=one.marks)
            continue
        pairs = [
            pair for pair in strategies.conversions(subject.backend) if pair.kept or not only_kept
        ]
        for pair in pairs:
            yield pytest.param(subject, pair, id=f"{one.id}-{pair}", marks=one.marks)
        if not pairs:
            none = pytest.mark.skip(reason="no format is stored as it is given")
            yield pytest.param(subject, None, id=one.id, marks=[*one.marks, none])


def _isolates(config: pytest.Config) -> bool:
    """Whether properties run in processes of their own: not for who wants to look inside."""
    return not (config.getoption("--ktk-no-isolation") or config.getoption("usepdb"))


def _is_of_the_kit(item: pytest.Item) -> bool:
    return isinstance(item, pytest.Function) and item.module.__name__ in (*BACKEND, *LAYER)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """Run a property in a process of its own."""
    if not _isolates(item.config) or not _is_of_the_kit(item) or item.get_closest_marker("skip"):
        return None
    hook, limit = item.ihook, item.config.getoption("--ktk-time-limit")
    hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in isolation.run(item, limit):
        hook.pytest_runtest_logreport(report=report)
    hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


@pytest.hookimpl(hookwrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """Keep the example in mind that a property tries."""
    with isolation.noting(pyfuncitem):
        yield


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give `subject`, and `pair` or `kept` where they are asked for, their values."""
    if metafunc.module.__name__ not in (*BACKEND, *LAYER) or "subject" not in metafunc.fixturenames:
        return
    for name, only_kept in (("pair", False), ("kept", True)):
        if name in metafunc.fixturenames:
            values = list(with_conversions(metafunc.config, only_kept))
            metafunc.parametrize(("subject", name), values)
            return
    metafunc.parametrize("subject", list(subjects(metafunc.config)))
