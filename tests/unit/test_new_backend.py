"""tools/new_backend.py, also ktk.testing.new_backend: what it writes builds and passes the kit."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("backends", "ktk", "native", "subprojects", "tests", "tools")
NEW_BACKEND = ROOT / "tools/new_backend.py"
FILES = ("meson.build", "meson.options", "pyproject.toml", "README.md", "LICENSE")


def run(*command: str | Path, **options: Any) -> str:
    done: subprocess.CompletedProcess[str] = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=600, check=False, **options
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the source tree; nothing is written into the real one."""
    skipped = shutil.ignore_patterns("__pycache__", "*.so", "build*")
    for name in SOURCES:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=skipped)
    for name in FILES:
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, tmp_path)
    return tmp_path


@pytest.mark.slow
def test_a_new_backend_builds_and_passes_the_kit(tree: Path) -> None:
    script = tree / "tools" / "new_backend.py"
    run(sys.executable, script, "Scaffold", "--dir", tree)

    _, _, entries = (tree / "pyproject.toml").read_text().partition('"ktk.backends"]\n')
    lines = entries.partition("\n\n")[0].splitlines()
    assert 'SCAFFOLD = "ktk._backends.scaffold"' in lines
    assert lines == sorted(lines)

    tools = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = os.environ | {"PATH": tools}
    build = tree / "build"
    run("meson", "setup", build, tree, "-Dbuildtype=release", env=env)
    # Only its own module: the rest is the ktk that runs this test.
    module = f"backends/scaffold{sysconfig.get_config_var('EXT_SUFFIX')}"
    run("ninja", "-C", build, module, env=env)

    env["PYTHONPATH"] = str(build / "backends")
    output = run(
        *(sys.executable, "-m", "ktk.testing", "scaffold", "-q", "-p", "no:cacheprovider"),
        *("--ktk-profile", "ci", "--ktk-examples", "15"),
        env=env,
        cwd=tree / "build",
    )
    assert " passed" in output
    assert " failed" not in output


@pytest.mark.slow
def test_a_package_of_its_own_builds_and_passes_the_kit(tmp_path: Path) -> None:
    folder, target = tmp_path / "package", tmp_path / "site"
    new = [sys.executable, "-m", "ktk.testing.new_backend", "Scaffold", "--package", str(folder)]
    assert f"pip install --no-build-isolation {folder}" in run(
        *new, cwd=tmp_path
    )  # not beside the source tree's ktk
    # pip looks for a name without a path in an index.
    other = run(*new[:-1], "other", cwd=tmp_path)
    assert f"pip install --no-build-isolation .{os.sep}other" in other

    tools = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    path = os.pathsep.join([str(target), os.environ.get("PYTHONPATH", "")]).rstrip(":")
    env = os.environ | {"PATH": tools, "PYTHONPATH": path}
    pip = "-m pip install -q --no-build-isolation --no-deps --no-index --disable-pip-version-check"
    run(sys.executable, *pip.split(), "--target", target, folder, env=env)
    listed = "import ktk; info = ktk.backends()['SCAFFOLD']; print(info.distribution, info.value)"
    assert run(sys.executable, "-c", listed, env=env, cwd=tmp_path).split() == [
        "ktk-backend-scaffold",
        "ktk_backend_scaffold.scaffold",
    ]
    output = run(
        *(sys.executable, "-m", "ktk.testing", "SCAFFOLD", "-q", "-p", "no:cacheprovider"),
        *("--ktk-profile", "ci", "--ktk-examples", "15"),
        env=env,
        cwd=tmp_path,
    )
    assert " passed" in output
    assert " failed" not in output

    again = subprocess.run(new, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert again.returncode != 0
    assert f"{folder} exists already" in again.stderr


def new_package(folder: Path, where: Path) -> subprocess.CompletedProcess[str]:
    script = ROOT / "tools" / "new_backend.py"
    command = [sys.executable, str(script), "Scaffold", "--package", str(folder)]
    return subprocess.run(command, cwd=where, capture_output=True, text=True, check=False)


def test_the_printed_command_is_one_that_a_shell_reads(tmp_path: Path) -> None:
    done = new_package(Path("two words"), tmp_path)
    assert done.returncode == 0, done.stderr
    [line] = [one for one in done.stdout.splitlines() if one.startswith("next: ")]
    assert shlex.split(line)[-1] == f".{os.sep}two words"


def test_a_folder_that_pip_or_the_system_refuses_is_named(tmp_path: Path) -> None:
    done = new_package(Path("some[thing]"), tmp_path)
    assert "some[thing]: pip takes what is in [ ] for extras" in done.stderr
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    done = new_package(tmp_path / "file" / "package", tmp_path)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert f"Not a directory: '{tmp_path}/file/package'" in done.stderr


def test_half_a_package_does_not_stay(tmp_path: Path) -> None:
    limits = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))"
    script = f"{limits}; import runpy; runpy.run_path({str(NEW_BACKEND)!r}, run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", script, "INT6", "--package", tmp_path / "int6"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("nothing usable was written: ")
    assert not (tmp_path / "int6").exists()


def test_a_backend_that_cannot_be_entered_leaves_the_tree_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(NEW_BACKEND.parent))
    import new_backend

    (tmp_path / "backends").mkdir()
    for path in ("pyproject.toml", "backends/meson.build"):
        shutil.copy(ROOT / path, tmp_path / path)
    write_text = Path.write_text

    def fails(path: Path, text: str) -> int:
        if path.name == "pyproject.toml" and "INT6" in text:
            raise OSError(28, "No space left on device", str(path))
        return write_text(path, text)

    monkeypatch.setattr(Path, "write_text", fails)
    with pytest.raises(SystemExit, match=r"nothing usable was written.*No space left"):
        new_backend.main(["INT6", "--dir", str(tmp_path)])
    assert not (tmp_path / "backends/int6").exists()
    for path in ("pyproject.toml", "backends/meson.build"):
        assert (tmp_path / path).read_text() == (ROOT / path).read_text()


@pytest.mark.parametrize("name", ["BF16", "two words", "1ST", "../x"])
def test_a_bad_name_is_refused_and_changes_nothing(name: str, tree: Path) -> None:
    before = (tree / "backends" / "meson.build").read_text()
    script = tree / "tools" / "new_backend.py"
    command = [sys.executable, str(script), name, "--dir", str(tree)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "exists already" in done.stderr or "is no name for a backend" in done.stderr
    assert (tree / "backends" / "meson.build").read_text() == before
