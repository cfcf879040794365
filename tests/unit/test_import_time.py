"""`import ktk` and the command start quickly, and load nothing that nobody asked for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

_INSPECTED = """
import json, os, sys
before = set(sys.modules)
import ktk
print(json.dumps({
    "modules": sorted(set(sys.modules) - before),
    "threads": len(os.listdir("/proc/self/task")),
}))
"""

# What only a tensor, a command, a checkpoint or a test needs.
_LAZY = (
    "gguf",
    "hypothesis",
    "matplotlib",
    "numpy",
    "pytest",
    "rich",
    "safetensors",
    "torch",
    "transformers",
    "typer",
)

# The time of this process alone: an editable install asks ninja whether there is anything to build.
_TIMED = """
import contextlib, io, resource, sys
with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
    {body}
used = resource.getrusage(resource.RUSAGE_SELF)
assert "torch" not in sys.modules
print(used.ru_utime + used.ru_stime)
"""

_COMMAND = """
import sys
sys.argv = ["ktk", {arguments}]
from ktk.__main__ import main
try:
    main()
except SystemExit as stop:
    assert not stop.code or {any_status}, stop.code
"""

_LAYER = """
import ktk, numpy as np
E, T, H, I = 2, 3, 64, 32
rng = np.random.default_rng(0)
for dtype in (np.float32, np.float16):
    moe = ktk.load_backend("BF16").moe(
        num_experts=E, num_experts_per_tok=2, hidden_size=H, intermediate_size=I
    )
    gate, up = (rng.standard_normal((E, I, H)).astype(dtype) for _ in range(2))
    moe.load(gate, up, rng.standard_normal((E, H, I)).astype(dtype))
    hidden = rng.standard_normal((T, H)).astype(dtype)
    ids = np.array([[0, 1]] * T)
    weights = rng.random((T, 2)).astype(np.float32)
    y = moe(hidden, ids, weights)
    assert type(y) is np.ndarray and y.dtype == dtype and np.abs(y).max() > 0
    assert np.array_equal(moe.submit(hidden, ids, weights).wait(), y)
    moe.unpack_expert(0)
"""

_WITHOUT_TORCH = {
    "import": "import ktk",
    "a layer": _LAYER,
    "headers": "import ktk, os; assert os.path.isfile(ktk.get_include() + '/ktk/abi.h')",
    **{
        "ktk " + " ".join(arguments): _COMMAND.format(
            arguments=", ".join(map(repr, arguments)), any_status=any_status
        )
        for arguments, any_status in (
            ((), True),
            (("--help",), False),
            (("version",), False),
            (("backends",), False),
            (("backends", "--json"), False),
            # Whether the machine is well is another test's matter.
            (("doctor",), True),
            (("bench", "--help"), False),
            (("demo", "--help"), False),
            (("convert", "--help"), False),
        )
    },
}

_BLOCK_TORCH = """
import sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, NoTorch())
"""


def run(program: str) -> str:
    """Run a program in a fresh interpreter, away from the source tree."""
    command = [sys.executable, "-P", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def cpu_seconds(body: str) -> float:
    """Return the least CPU time of several runs: other programs can only add to it."""
    return min(float(run(_TIMED.format(body=body))) for _ in range(5))


def allowed(seconds: float) -> float:
    """Return the time that something may take: on a slow machine, in proportion to numpy's import.

    That takes a tenth of a second where this package was first measured.
    """
    return seconds * max(1, (cpu_seconds("import numpy") - cpu_seconds("pass")) / 0.1)


def test_import_takes_little_memory() -> None:
    """Torch takes 200 MB; Python with ktk has to do with a quarter of that."""
    # Not ru_maxrss: a child starts with that of its parent.
    [line] = run("import ktk; print(open('/proc/self/status').read())").split("VmRSS:")[1:]
    assert int(line.split()[0]) < 50_000  # KiB


@pytest.mark.slow
def test_import_takes_a_tenth_of_a_second() -> None:
    assert cpu_seconds("import ktk") - cpu_seconds("import subprocess") < allowed(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", ["", ", '--help'"])
def test_help_takes_a_quarter_of_a_second(arguments: str) -> None:
    body = f"sys.argv = ['ktk'{arguments}]; from ktk.__main__ import main; main()"
    assert cpu_seconds(body) < allowed(0.25)


def test_import_loads_no_backend_and_no_optional_package() -> None:
    modules = json.loads(run(_INSPECTED))["modules"]
    assert "ktk._core" in modules
    lazy = [name for name in modules if name.partition(".")[0] in _LAZY]
    assert not lazy
    loaded = [name for name in modules if name.startswith("ktk._backends.")]
    assert not loaded


@pytest.mark.slow
@pytest.mark.parametrize("program", _WITHOUT_TORCH.values(), ids=_WITHOUT_TORCH)
def test_torch_is_not_needed(program: str) -> None:
    run(f"{program}\nimport sys\nassert 'torch' not in sys.modules")
    run(_BLOCK_TORCH + program)


@pytest.mark.slow
def test_what_needs_torch_is_there_when_it_is_asked_for() -> None:
    names = "KTMoEWrapper", "generate_gpu_experts_masks"
    run(f"import ktk; assert {{*{names}}} <= {{*dir(ktk)}}; assert callable(ktk.KTMoEWrapper)")
    run(f"from ktk import *; from ktk import {', '.join(names)}; import torch")
    run("import ktk\ntry: ktk.nothing\nexcept AttributeError as e: assert 'nothing' in str(e)")


@pytest.mark.slow
def test_type_checkers_know_the_names_and_no_others(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    names = "ktk.KTMoEWrapper, ktk.generate_gpu_experts_masks, ktk.MoE"
    program.write_text(f"import ktk\nnumber: str = ktk.__version__\n{names}\nktk.nothing\n")
    api = pytest.importorskip("mypy.api")
    text, _, status = api.run([str(program), "--follow-imports=silent", "--no-error-summary"])
    assert status == 1
    [line] = text.splitlines()
    assert line.endswith(':4: error: Module has no attribute "nothing"  [attr-defined]')


def test_import_starts_no_threads() -> None:
    with_ktk = json.loads(run(_INSPECTED))["threads"]
    without = json.loads(run(_INSPECTED.replace("import ktk\n", "")))["threads"]
    assert with_ktk == without
