"""`ktk compat`: programs that import kt_kernel get ktk, where somebody asked for it only."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import os
import subprocess
import sys
import zipfile
from importlib.metadata import distribution, version
from pathlib import Path

import pytest

from ktk.compat import environment, folder, kt_version
from ktk.compat.wheel import write_wheel

_SHOW = "import kt_kernel; print(kt_kernel.__file__)"


def run(
    *command: str, status: int = 0, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command in an environment without PYTHONPATH, or in `env`.

    The folder is one without the sources of ktk, which may not be what is installed.
    """
    clean = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env=clean if env is None else env,
        cwd=Path(__file__).parent,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done


def ktk(*arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, "-m", "ktk", "compat", *arguments, status=status)


def python(program: str) -> str:
    """Run a program in the environment of `ktk compat run`."""
    return run(sys.executable, "-c", program, env=environment(os.environ)).stdout


@pytest.fixture
def rival(tmp_path: Path) -> Path:
    """A folder with a kt_kernel that is not ktk."""
    package = tmp_path / "rival" / "kt_kernel"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    return package.parent


def test_an_installation_of_ktk_brings_no_kt_kernel() -> None:
    at = "import importlib.util as u; s = u.find_spec('kt_kernel'); print(s and s.origin)"
    found = run(sys.executable, "-P", "-c", at).stdout.strip()
    assert not Path(found).is_relative_to(Path(sys.modules["ktk"].__file__ or "").parent)
    files = distribution("ktk").files or []
    assert not [path for path in files if path.parts[0] == "kt_kernel"]


@pytest.mark.slow
def test_the_folder_is_printed_and_stands_before_what_is_installed(rival: Path) -> None:
    printed = ktk("--path").stdout.strip()
    assert printed == str(folder())
    env = {**os.environ, "PYTHONPATH": f"{printed}{os.pathsep}{rival}"}
    first = run(sys.executable, "-c", _SHOW, env=env).stdout
    assert first.startswith(printed)
    env["PYTHONPATH"] = str(rival)
    assert run(sys.executable, "-c", _SHOW, env=env).stdout.startswith(str(rival))


def test_what_stood_in_pythonpath_stays_behind() -> None:
    assert environment({"PYTHONPATH": "/a:/b", "X": "1"}) == {
        "PYTHONPATH": f"{folder()}:/a:/b",
        "X": "1",
    }
    # An empty part would mean the working directory.
    assert environment({"PYTHONPATH": ""})["PYTHONPATH"] == str(folder())


def test_the_names_are_those_of_ktk() -> None:
    printed = python(
        """
import ktk, kt_kernel
from kt_kernel import KTMoEWrapper, generate_gpu_experts_masks, kt_kernel_ext
import kt_kernel.kt_kernel_ext
assert KTMoEWrapper is ktk.KTMoEWrapper
assert generate_gpu_experts_masks is ktk.generate_gpu_experts_masks
for name in ("FP8LayerwiseTransport", "initialize_fp8_layerwise_control", "moe"):
    assert not hasattr(kt_kernel_ext, name)
try:
    kt_kernel_ext.moe
except AttributeError as error:
    print(error)
assert kt_kernel.__cpu_variant__ in ("amx", "avx512", "avx2", "arm")
print(kt_kernel.__version__)
"""
    )
    sentence, number = printed.splitlines()
    assert "no 'moe': this kt_kernel is ktk" in sentence
    assert number == kt_version()
    assert number.startswith("0.7.2+ktk.")


@pytest.mark.slow
def test_fine_tuning_is_refused_with_a_sentence() -> None:
    printed = python(
        """
for module in ("kt_kernel.sft", "kt_kernel.sft.deepseek_v4"):
    try:
        __import__(module)
    except ImportError as error:
        print(error)
"""
    )
    assert len(printed.splitlines()) == 2
    for line in printed.splitlines():
        assert "this kt_kernel is ktk: train experts with ktk.sft" in line


@pytest.mark.slow
def test_spawned_processes_inherit_it(tmp_path: Path) -> None:
    script = tmp_path / "spawn.py"
    script.write_text(
        """
import multiprocessing

def child():
    import kt_kernel
    print(kt_kernel.__file__, flush=True)

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=child)
    process.start()
    process.join()
    raise SystemExit(process.exitcode)
"""
    )
    assert ktk("run", str(script)).stdout.startswith(str(folder()))


@pytest.mark.slow
def test_run_gives_arguments_and_status_of_the_command(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text("import sys, kt_kernel\nprint(sys.argv[1:])\nsys.exit(7)\n")
    wanted = "['--help', '-m', '--wheel', 'x']\n"
    assert ktk("run", str(script), *("--help", "-m", "--wheel", "x"), status=7).stdout == wanted
    code = "import sys; print(sys.argv[1:])"
    assert ktk("run", "-c", code, *("--help", "-m", "--wheel", "x")).stdout == wanted
    assert ktk("run", "-m", "ktk", "--version").stdout == f"ktk {version('ktk')}\n"
    program = f"{sys.executable} -c '{_SHOW}'"
    assert ktk("run", "sh", "-c", program).stdout.startswith(str(folder()))
    assert "no program none-of-this-name" in ktk("run", "none-of-this-name", status=1).stderr


def test_two_wishes_at_once_are_a_wrong_command_line(tmp_path: Path) -> None:
    for rest in (["--wheel", str(tmp_path)], ["run", "-c", ""]):
        assert "only one of" in ktk("--path", *rest, status=2).stderr
    assert not list(tmp_path.iterdir())


def test_the_wheel_is_written_alike_and_its_record_is_right(tmp_path: Path) -> None:
    first, second = (Path(ktk("--wheel", str(tmp_path / n)).stdout.strip()) for n in "ab")
    assert first.name == f"kt_kernel-{kt_version()}-py3-none-any.whl"
    assert first.read_bytes() == second.read_bytes()
    with zipfile.ZipFile(first) as archive:
        names = archive.namelist()
        record = archive.read(f"kt_kernel-{kt_version()}.dist-info/RECORD").decode()
        rows = list(csv.reader(io.StringIO(record)))
        assert [row[0] for row in rows] == names
        for name, checksum, size in rows[:-1]:
            data = archive.read(name)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
            assert (checksum, size) == (f"sha256={digest}", str(len(data)))
        assert rows[-1][1:] == ["", ""]
        for path in folder().rglob("*.py"):
            assert archive.read(str(path.relative_to(folder()))) == path.read_bytes()


@pytest.mark.slow
def test_a_real_installation_satisfies_who_requires_kt_kernel(tmp_path: Path) -> None:
    home = tmp_path / "venv"
    run(sys.executable, "-m", "venv", str(home))
    inside = str(home / "bin" / "python")
    [packages] = home.glob("lib/python*/site-packages")
    _lend_ktk(packages)
    wheels = tmp_path / "wheels"
    ours = write_wheel(wheels)
    install = [inside, "-m", "pip", "install", "-q", "--no-index", "--find-links", str(wheels)]
    run(*install, str(_client(wheels, "kt-kernel==0.7.2")))
    shown = f"{_SHOW}; from importlib.metadata import version as v; print(v('kt-kernel'))"
    where, number = run(inside, "-c", shown).stdout.split()
    assert Path(where) == packages / "kt_kernel" / "__init__.py"
    assert number == kt_version()
    assert f"kt_kernel-{number}" in ours.name
    sizes = "KTMoEWrapper(0, 4, 2, 64, 64, method='BF16')"
    run(inside, "-c", f"from kt_kernel import KTMoEWrapper; {sizes}")
    # Another release of kt-kernel is another matter.
    refused = run(*install, str(_client(wheels, "kt-kernel==0.7.1", "other")), status=1)
    assert "kt-kernel==0.7.1" in refused.stderr
    # Nobody is told to replace a kt-kernel that is this one.
    again = run(inside, "-m", "ktk", "compat", "--wheel", str(tmp_path / "again"))
    assert again.stderr == ""
    # Of a true one, its GPU kernels would be lost.
    [info] = packages.glob("kt_kernel-*.dist-info")
    metadata = info / "METADATA"
    metadata.write_text(metadata.read_text().replace(number, "0.7.2"))
    told = run(inside, "-m", "ktk", "compat", "--wheel", str(tmp_path / "again"))
    assert "kt-kernel 0.7.2 is installed here" in told.stderr


def _lend_ktk(packages: Path) -> None:
    """Make the ktk of this environment one of another, without what it requires.

    The resolver would compare these with packages that a new environment has.
    """
    # Editable installs are .pth files, which are read in site's folders only.
    here = [path for path in sys.path if path.endswith("-packages")]
    (packages / "here.pth").write_text(
        "".join(f"import site; site.addsitedir({path!r})\n" for path in here)
    )
    own = distribution("ktk")
    info = packages / f"ktk-{own.version}.dist-info"
    info.mkdir()
    for name in ("METADATA", "entry_points.txt"):
        lines = (own.read_text(name) or "").splitlines(keepends=True)
        (info / name).write_text("".join(x for x in lines if not x.startswith("Requires-Dist")))


def _client(into: Path, requirement: str, name: str = "client") -> Path:
    """Write the wheel of a program that requires kt-kernel."""
    wheel = into / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    files = {
        f"{name}.py": "",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
        f"Requires-Dist: {requirement}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in (*files, f"{info}/RECORD"))
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return wheel
