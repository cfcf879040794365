"""Which library BLIS takes, what it refuses, and what it says about both."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from blis_tools import NAMES, debian, describe, python, standin

# The dynamic linker reads LD_LIBRARY_PATH when a process starts, so these have one of their own.
SEARCH = """
import json, ktk
try:
    print(json.dumps(ktk.load_backend("BLIS").library["library"]))
except ktk.BackendUnsupported as error:
    print(json.dumps(str(error)))
"""


def load(library: Path, **environment: str) -> Any:
    found = describe(library, **environment)
    assert "error" not in found, found
    return found


def reason(library: Path | str) -> str:
    return str(describe(library)["error"])


def search(folder: str) -> str:
    return str(python(SEARCH, KTK_BLIS_LIBRARY="", LD_LIBRARY_PATH=folder))


def test_int8_products_come_first() -> None:
    found = load(standin())
    assert list(found["layouts"]) == ["lpgemm_int8", "sgemm"]
    assert found["library"] == {
        "library": str(standin()),
        "mode": "lpgemm-int8, sgemm",
        "version": "stand-in 1.0",
        "kernels": "zen3",
    }
    assert found["warnings"] == []


def test_aocl_dlp_has_neither_floats_nor_bli_functions() -> None:
    found = load(standin("DLP"))
    assert list(found["layouts"]) == ["lpgemm_int8"]
    expected = {"library": str(standin("DLP")), "mode": "lpgemm-int8", "version": "5.3.0"}
    assert found["library"] == expected
    assert found["warnings"] == []


def test_plain_blas_is_taken_and_called_slow() -> None:
    found = load(standin("NO_LPGEMM"))
    assert found["layouts"] == {"sgemm": "i8-rows"}
    assert found["library"]["mode"] == "sgemm"
    refused = "lpgemm-int8 does not export aocl_get_reorder_buf_size_s8s8s32os32"
    assert found["library"]["refused"] == f"{standin('NO_LPGEMM')}: {refused}"
    [warning] = found["warnings"]
    assert warning == (
        f"BLIS will be slow: {standin('NO_LPGEMM')} has no int8 products and multiplies floats; "
        "AMXINT8 takes the same weights"
    )


def test_generic_kernels_are_warned_of_once_with_the_variable_to_set() -> None:
    [warning] = load(standin("GENERIC"))["warnings"]
    assert "does not know this CPU and runs its generic kernels" in warning
    suitable = {"BLIS_ARCH_TYPE=4 (zen3)", "BLIS_ARCH_TYPE=0 (skx)", "BLIS_ARCH_TYPE=1 (haswell)"}
    assert sum(choice in warning for choice in suitable) == 1
    assert load(standin("GENERIC"), BLIS_ARCH_TYPE="5")["warnings"] == [], "the user chose"


@pytest.mark.parametrize(
    ("variation", "why"),
    [
        ("SILENT", "leaves the product of 5 x 48 x 64 untouched"),
        ("SATURATES", "makes a wrong product of 5 x 48 x 64"),
        ("OVERRUNS", "reordering weights of 5 x 48 x 64 writes more than was said"),
    ],
)
def test_int8_products_that_do_not_work_are_refused(variation: str, why: str) -> None:
    found = load(standin(variation))
    assert list(found["layouts"]) == ["sgemm"], "the float products of the same library do"
    assert found["library"]["refused"].startswith(f"{standin(variation)}: lpgemm-int8 {why}")
    alone = reason(standin("DLP", variation))
    assert f"lpgemm-int8 {why}" in alone, "and without them nothing is left"


def test_64_bit_integers_are_refused_before_anything_is_called() -> None:
    text = reason(standin("NO_LPGEMM", "INT_BITS=64"))
    assert "sgemm has BLAS integers of 64 bits, not the usual 32" in text


def test_a_chosen_library_is_the_only_one_that_is_tried(tmp_path: Path) -> None:
    folder = hide(tmp_path, {"libblis.so.4": standin()})
    wrong: dict[str, Any] = {"KTK_BLIS_LIBRARY": "/nowhere/libblis.so", "LD_LIBRARY_PATH": folder}
    text = python(SEARCH, **wrong)
    assert "cannot run here: KTK_BLIS_LIBRARY=/nowhere/libblis.so: there is no such library" in text
    text = reason("libm.so.6")
    assert "KTK_BLIS_LIBRARY names what cannot be used: libm.so.6 (" in text
    assert "sgemm does not export cblas_sgemm" in text


# Has the C library say German words, which are not installed everywhere, and searches.
TRANSLATED = """
import ctypes, locale
ctypes.CDLL(None).bindtextdomain(b"libc", b"FOLDER")
locale.setlocale(locale.LC_ALL, "")
try:
    ctypes.CDLL("/nowhere/libnone.so")
except OSError as error:
    assert str(error) == "/nowhere/libnone.so: kann nicht geoeffnet werden: fehlt", error
"""


def write_catalog(path: Path, words: dict[str, str]) -> None:
    """Write a file of translations as GNU gettext has them; `words` is sorted."""
    entries = [text.encode() for text in (*words, *words.values())]
    begin = 28 + 8 * len(entries)
    places = [
        struct.pack("<2I", len(text), begin + sum(len(before) + 1 for before in entries[:i]))
        for i, text in enumerate(entries)
    ]
    n = len(words)
    head = struct.pack("<7I", 0x950412DE, 0, n, 28, 28 + 8 * n, 0, 0)
    path.parent.mkdir(parents=True)
    path.write_bytes(head + b"".join(places) + b"".join(text + b"\0" for text in entries))


def test_what_is_absent_is_known_in_any_language(tmp_path: Path) -> None:
    words = {
        "": "Content-Type: text/plain; charset=UTF-8\n",
        "No such file or directory": "fehlt",
        "cannot open shared object file": "kann nicht geoeffnet werden",
    }
    write_catalog(tmp_path / "de" / "LC_MESSAGES" / "libc.mo", words)
    language: dict[str, Any] = {"LC_ALL": "C.UTF-8", "LANGUAGE": "de"}
    code = TRANSLATED.replace("FOLDER", str(tmp_path)) + SEARCH
    text = python(code, KTK_BLIS_LIBRARY="/nowhere/libblis.so", **language)
    assert "KTK_BLIS_LIBRARY=/nowhere/libblis.so: there is no such library" in text


def hide(folder: Path, shown: dict[str, Path]) -> str:
    """Put libraries under names that are looked for, and files that are none under the others.

    The dynamic linker ends its search there, so that what is installed does not show.
    """
    for name in NAMES:
        if name in shown:
            (folder / name).symlink_to(shown[name])
        else:
            (folder / name).write_text("no library\n" * 10)
    return str(folder)


@pytest.mark.parametrize(
    ("shown", "taken"),
    [
        ({"libblis-mt.so": ("NO_LPGEMM",), "libblis.so": ("SALT=1",)}, ("SALT=1",)),
        ({"libaocl-dlp.so": ("DLP", "SILENT"), "libblis.so.4": ("NO_LPGEMM",)}, ("NO_LPGEMM",)),
        ({"libblis-mt.so.5": ("SILENT",), "libblis.so.4": ("NO_LPGEMM",)}, ("SILENT",)),
    ],
    ids=["best mode of any", "float products if nothing else", "first of a mode"],
)
def test_names_are_tried_in_order(
    shown: dict[str, Sequence[str]], taken: Sequence[str], tmp_path: Path
) -> None:
    folder = hide(tmp_path, {name: standin(*variations) for name, variations in shown.items()})
    assert search(folder) == str(standin(*taken))


def test_without_a_library_the_message_says_what_to_do(tmp_path: Path) -> None:
    text = search(hide(tmp_path, {}))
    assert text.startswith("backend BLIS of ktk ")
    assert " cannot run here: KTK_BLIS_LIBRARY is not set, and of libaocl-dlp.so, " in text
    for part in (*NAMES, "LD_LIBRARY_PATH", "libblis4-openmp", "AOCL-DLP", "aocl_gemm addon"):
        assert part in text
    assert "/path/to/library.so" in text
    assert "AMXINT8" in text
    assert "\n" not in text


@pytest.mark.slow
def test_a_library_that_is_missing_is_reported(tmp_path: Path) -> None:
    hidden = {"KTK_BLIS_LIBRARY": "", "LD_LIBRARY_PATH": hide(tmp_path, {})}
    listing = python(
        "from ktk.cli import app; app(['backends', '--json'], standalone_mode=False)",
        check=False,
        **hidden,
    )
    entries = {entry["name"]: entry for entry in json.loads(listing.stdout)["backends"]}
    assert entries["BLIS"]["error_kind"] == "BackendUnsupported"
    assert "libblis4-openmp" in entries["BLIS"]["error"]
    kit = "import sys; from ktk.testing.__main__ import main; sys.exit(main(['BLIS', '-q']))"
    named = python(kit, check=False, **hidden)
    assert named.returncode == 4, "a backend that is asked for has to load"
    assert named.stderr.startswith("ERROR: backend BLIS of ktk")


def doctor(**environment: str) -> tuple[int, list[dict[str, str]]]:
    done = python("from ktk.cli import app; app(['doctor', '--json'])", check=False, **environment)
    findings = json.loads(done.stdout)["findings"]
    return done.returncode, [one for one in findings if "BLIS" in one["text"]]


@pytest.mark.slow
def test_doctor_is_content_with_a_library_and_without(tmp_path: Path) -> None:
    status, [finding] = doctor(KTK_BLIS_LIBRARY="", LD_LIBRARY_PATH=hide(tmp_path, {}))
    assert (status, finding["state"]) == (0, "note")
    assert finding["text"] == "BLIS is not used here: needs a BLIS library, and finds none"
    assert finding["advice"].startswith("apt-get install libblis4-openmp")
    status, [finding] = doctor(KTK_BLIS_LIBRARY="/nowhere/libblis.so")
    assert (status, finding["state"]) == (0, "note")
    assert "KTK_BLIS_LIBRARY names no library that can be used" in finding["text"]
    status, [finding] = doctor(KTK_BLIS_LIBRARY=str(standin()))
    assert (status, finding["state"]) == (0, "ok")


def test_layouts_tell_reorderings_apart() -> None:
    plain, dlp, other = (load(standin(*v))["layouts"] for v in ((), ("DLP",), ("SALT=1",)))
    assert plain["lpgemm_int8"].startswith("lpgemm-n128k512-")
    assert plain["lpgemm_int8"] == dlp["lpgemm_int8"], "two libraries that reorder alike"
    assert plain["lpgemm_int8"] != other["lpgemm_int8"]
    assert plain["sgemm"] == other["sgemm"] == "i8-rows"


@pytest.mark.parametrize("flavour", ["openmp", "pthread", "serial"])
def test_debians_library_is_taken(flavour: str) -> None:
    path = debian(flavour)
    if path is None:
        pytest.skip(f"the package libblis4-{flavour} is not installed")
    found = load(path)
    assert list(found["layouts"]) == ["sgemm"]
    assert found["library"]["library"] == str(path.resolve())
    assert found["library"]["version"]
    assert os.path.basename(path) in found["warnings"][0]
