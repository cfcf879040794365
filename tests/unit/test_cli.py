"""The command line says what is there, and what is wrong in one sentence."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import ktk
from ktk import BackendInfo, _core, registry
from ktk.cli import app, report
from ktk.errors import BackendImportError

runner = CliRunner()


def invoke(*arguments: str) -> str:
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result.output


def test_version() -> None:
    assert invoke("--version") == invoke("-V") == f"ktk {version('ktk')}\n"
    assert ktk.__version__ == version("ktk")
    text = invoke("version")
    assert text.startswith(invoke("--version"))
    facts = json.loads(invoke("version", "--json"))
    assert facts["python"] == platform.python_version()
    assert facts["torch"] == version("torch")
    assert facts["backends"].keys() == registry.backends().keys()
    assert facts["backends"]["BF16"] == registry.load_backend("BF16").core.default_variant()
    for name, variant in facts["backends"].items():
        assert any(
            line.startswith(f"{variant or 'not here'}: ") and name in line
            for line in text.splitlines()
        )
    for fact in ("python", "platform", "torch", "cpu"):
        assert facts[fact] in text


COMMANDS = (
    "backends",
    "bench",
    "chat",
    "compat",
    "config",
    "convert",
    "demo",
    "doctor",
    "inspect",
    "model",
    "placement",
    "run",
    "serve",
    "verify",
    "version",
)
# What these do is no document.
WITHOUT_JSON = ("chat", "compat", "serve")
OF_MODEL = ("list", "info", "verify")
ALL = [*(name for name in COMMANDS if name != "model"), *(f"model {name}" for name in OF_MODEL)]


@pytest.mark.parametrize("command", ALL)
@pytest.mark.parametrize("columns", ["40", "80"])
def test_help_of_every_command(command: str, columns: str) -> None:
    short, long = (
        runner.invoke(app, [*command.split(), option], env={"COLUMNS": columns}).output
        for option in ("-h", "--help")
    )
    assert short == long
    assert "<bool>" not in short, "a flag takes no value"
    assert ("--json" in short) == (command not in WITHOUT_JSON)


def test_each_command_is_explained_in_one_line_that_fits() -> None:
    listed = invoke("-h").partition("Commands:")[2].splitlines()[1:]
    assert sorted(line.split()[0] for line in listed) == sorted(COMMANDS)
    inside = invoke("model", "-h").partition("Commands:")[2].splitlines()[1:]
    assert [line.split()[0] for line in inside] == list(OF_MODEL)
    assert not [line for line in (*listed, *inside) if "..." in line]


def test_nothing_to_do_is_a_wrong_command_line() -> None:
    done = run_ktk()
    assert done.returncode == 2
    assert "Commands:" in done.stdout + done.stderr


def test_a_slip_is_named() -> None:
    done = run_ktk("inspct")
    assert done.returncode == 2
    assert "Did you mean 'inspect'?" in done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_can_complete(shell: str) -> None:
    # Otherwise typer asks for the shell that runs the tests; there may be none.
    script = run_ktk("--show-completion", shell, _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert script.returncode == 0, script.stderr
    assert "_KTK_COMPLETE" in script.stdout
    asked = {"_KTK_COMPLETE": "complete_bash", "COMP_WORDS": "ktk bench --fo", "COMP_CWORD": "2"}
    assert run_ktk(**asked).stdout.split() == ["--format"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variable", "what"),
    [
        ("KTK_ISA", "; expected one of "),
        ("KTK_PREFETCH", ", and 'bogus' in it is neither a CPU (zen4, "),
    ],
)
def test_a_wrong_variable_is_one_line(variable: str, what: str) -> None:
    for command in ("backends", "version", "demo"):
        done = run_ktk(command, **{variable: "bogus"})
        assert done.returncode == 1
        [line] = done.stderr.splitlines()
        assert line.startswith(f"ktk: {variable} is 'bogus'{what}")


def test_ctrl_c_ends_with_130() -> None:
    program = (
        "import os, signal, sys\n"
        "from ktk.cli import report\n"
        "report.providers = lambda: signal.raise_signal(signal.SIGINT)\n"
        "sys.argv = ['ktk', 'backends']\n"
        "from ktk.__main__ import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "")


def test_a_warning_is_one_line() -> None:
    program = (
        "import sys, warnings\n"
        "from ktk.cli import report\n"
        "report.providers = lambda: warnings.warn('libx is\\n slow') or []\n"
        "sys.argv = ['ktk', 'backends']\n"
        "from ktk.__main__ import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stderr == "ktk: libx is slow\n"


def test_an_interrupted_command_may_say_what_it_leaves() -> None:
    program = (
        "import sys\n"
        "from ktk import CheckpointError\n"
        "from ktk.cli import report\n"
        "def stop():\n"
        "    try: raise KeyboardInterrupt\n"
        "    except KeyboardInterrupt: raise CheckpointError('go on with --resume') from None\n"
        "report.providers = stop\n"
        "sys.argv = ['ktk', 'backends']\n"
        "from ktk.__main__ import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "ktk: go on with --resume\n")


@pytest.mark.parametrize("arguments", [["backends"], ["backends", "--json"], ["version"]])
def test_a_reader_that_went_away_ends_the_command_quietly(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "ktk", *arguments]
    env = os.environ | {"PYTHONWARNINGS": "ignore"}  # a library may be slow
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, env=env)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_closed_output_is_no_fault() -> None:
    command = f"{sys.executable} -m ktk version >&-"
    env = os.environ | {"PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, shell=True, capture_output=True, text=True, env=env)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("closed", ["2>&-", "<&- 2>&-", "<&- >&- 2>&-"])
def test_files_get_no_number_of_a_stream_that_is_closed(closed: str, tmp_path: Path) -> None:
    program = (
        "import os, sys\n"
        "from ktk.cli import report\n"
        "path = sys.argv.pop()\n"
        "def providers():\n"
        "    with open(path, 'w') as file:\n"
        "        os.write(2, b'a library speaks')\n"
        "        print(file.fileno() > 2, None in (sys.stdin, sys.stdout, sys.stderr), file=file)\n"
        "    raise RuntimeError('for nobody')\n"
        "report.providers = providers\n"
        "sys.argv = ['ktk', 'backends']\n"
        "from ktk.__main__ import main; main()"
    )
    path = tmp_path / "data"
    command = f"{shlex.join([sys.executable, '-c', program, str(path)])} {closed}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")
    assert path.read_text() == "True False\n"


def test_everything_about_one_backend() -> None:
    document = json.loads(invoke("backends", "bf16", "--json"))
    [entry] = document["backends"]
    assert entry["name"] == "BF16"
    text = invoke("backends", "bf16")
    for variant in entry["variants"]:
        assert f"variant {variant['name']}: " in text
    assert "stores bf16" in text
    assert "other names: AMXBF16" in text
    done = run_ktk("backends", "HQQ")
    assert (done.returncode, done.stderr.startswith("ktk: no backend 'HQQ'; ")) == (1, True)
    assert "Did you mean" not in done.stderr


@pytest.mark.parametrize("command", [["backends"], ["backends", "BF16"]])
def test_a_terminal_of_40_columns_breaks_no_word(command: list[str]) -> None:
    done = run_ktk(*command, FORCE_COLOR="1", COLUMNS="40")
    lines = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout).splitlines()
    assert max(map(len, lines)) <= 40
    wide = run_ktk(*command, FORCE_COLOR="1", COLUMNS="400").stdout
    words = set(re.sub(r"\x1b\[[0-9;]*m", "", wide).split())
    # What changes from run to run, like the free memory, has digits.
    torn = {word for line in lines for word in line.split()} - words
    assert not [word for word in torn if not re.search(r"[\d─]", word)]


@pytest.mark.parametrize("columns", [40, 80])
def test_a_backend_is_a_line_of_whole_words(columns: int) -> None:
    done = run_ktk("backends", COLUMNS=str(columns))
    lines = done.stdout.splitlines()
    for name in registry.backends():
        assert [line.split()[:1] for line in lines].count([name]) == 1
    words = set(" ".join(lines).replace(",", " ").replace(";", " ").split())
    for entry in json.loads(invoke("backends", "--json"))["backends"]:
        expected = [one["name"] for one in entry["variants"]] or entry["brief"].split()
        assert {word.strip(",") for word in expected} <= words


def test_help_lists_the_commands() -> None:
    text = invoke("--help")
    for command in ("backends", "bench", "demo", "doctor", "inspect", "verify", "version"):
        assert command in text


def test_backends_prints_every_backend_and_variant() -> None:
    text = invoke("backends")
    for name in ("BF16", "AMXINT8"):
        assert name in text
        for variant in registry.load_backend(name).variants:
            assert variant.name in text


def test_backends_as_json_says_what_runs_here() -> None:
    document = json.loads(invoke("backends", "--json"))
    found = {entry["name"]: entry for entry in document["backends"]}
    for name in ("BF16", "AMXINT8"):
        entry = found[name]
        assert entry["distribution"] == "ktk"
        assert entry["error"] is None
        default = [variant["name"] for variant in entry["variants"] if variant["default"]]
        assert default == [entry["runs"]]
        best = [variant["name"] for variant in entry["variants"] if variant["runnable"]]
        slow = set(_core.slow_isa())
        fast = [v["name"] for v in entry["variants"] if not slow & set(v["required_isa"])]
        assert entry["runs"] == next((name for name in best if name in fast), best[0])
    assert set(document["allowed_isa"]) <= set(document["detected_isa"])


def test_backends_lists_what_other_names_mean() -> None:
    known = registry.aliases()
    assert known["MOE_INT8"] in registry.backends()
    text = invoke("backends")
    for name, backend in known.items():
        assert f"{name} means {backend}: " in text
    document = json.loads(invoke("backends", "--json"))
    assert {entry["name"]: entry["backend"] for entry in document["aliases"]} == known


def run_ktk(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ktk", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )


def test_a_variant_that_cannot_run_has_its_reason() -> None:
    """Capped to AVX2, AVX-512 and AMX are missing on any machine."""
    done = run_ktk("backends", "--json", KTK_ISA="avx2")
    assert done.returncode == 0, done.stderr
    for entry in json.loads(done.stdout)["backends"]:
        if entry["distribution"] != "ktk" or entry["error_kind"] == "BackendUnsupported":
            continue
        if entry["library"]:  # which has its own ways to choose instructions
            assert {isa for v in entry["variants"] for isa in v["required_isa"]} == {"avx2"}
            continue
        assert entry["runs"] == "avx2"
        for variant in entry["variants"]:
            assert variant["runnable"] == (variant["name"] == "avx2")
            assert (variant["reason"] is None) == variant["runnable"]


@pytest.fixture
def broken_and_rival(monkeypatch: pytest.MonkeyPatch) -> None:
    infos = [
        BackendInfo("BROKEN", "acme", "1.2", "acme.broken"),
        BackendInfo("TWICE", "acme", "1.2", "acme.twice", rivals=("zeta",)),
    ]

    def open_backend(info: BackendInfo) -> Any:
        message = f"backend {info} failed [libfoo.so missing]"
        raise BackendImportError(message, brief="fails to load")

    monkeypatch.setattr(report, "providers", lambda: infos)
    monkeypatch.setattr(report, "find_backend", lambda name: infos[0])
    monkeypatch.setattr(report, "open_backend", open_backend)


@pytest.mark.usefixtures("broken_and_rival")
def test_a_broken_plugin_is_a_row_and_not_a_crash() -> None:
    entries = json.loads(invoke("backends", "--json"))["backends"]
    assert [entry["error_kind"] for entry in entries] == ["BackendImportError"] * 2
    assert entries[0]["error"] == "backend BROKEN of acme 1.2 failed [libfoo.so missing]"
    assert entries[1]["rivals"] == ["zeta"]
    assert entries[0]["brief"] == "fails to load"
    assert "fails to load" in invoke("backends")
    assert "also provided by zeta" in invoke("backends")
    text = invoke("backends", "BROKEN")
    assert "BackendImportError" in text
    assert "[libfoo.so" in text, "brackets of a message are not markup"


def test_python_m_ktk_is_the_command() -> None:
    done = run_ktk("--version")
    assert (done.returncode, done.stdout.strip()) == (0, f"ktk {version('ktk')}")


@pytest.mark.slow
def test_a_foreseen_error_is_one_sentence(tmp_path: Any) -> None:
    done = run_ktk("demo", "--checkpoint", str(tmp_path / "nowhere"))
    assert done.returncode == 1
    assert done.stderr.startswith("ktk: ")
    assert "is missing" in done.stderr
    assert "Traceback" not in done.stderr


def test_bench_passes_its_options_on() -> None:
    assert "--json" in invoke("bench", "--help")
