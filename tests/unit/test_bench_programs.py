"""Programs of tools/bench: what they refuse, and that they end. Nothing is measured."""

from __future__ import annotations

import argparse
import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools/bench"))

import cost
import machines
import training_curve
import whole


def test_an_error_in_a_run_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise MemoryError("planted")

    monkeypatch.setattr(training_curve, "ktk_model", fail)
    before = threading.active_count()
    with pytest.raises(MemoryError, match="planted"):
        training_curve.train("ktk", argparse.Namespace())
    assert threading.active_count() == before


def curve(run: str, *losses: float) -> dict[str, Any]:
    sizes = {"seconds": 1.0, "started": 1, "experts": 10, "factors": 1, "peak": 20}
    return {"run": run, "losses": losses} | sizes


def test_a_curve_is_reported_without_the_one_that_others_are_compared_with(
    capsys: pytest.CaptureFixture[str],
) -> None:
    training_curve.report([curve("ktk", 3.0, 2.0)])
    assert "to torch" not in (alone := capsys.readouterr().out)
    assert "ktk: loss 3.000 to 2.000" in alone
    training_curve.report([curve("ktk", 3.0, 2.0), curve("torch", 3.0, 1.5)])
    assert "ktk to torch: 0.2500 on average, 0.5000 at most" in capsys.readouterr().out


def measured(tokens: int, one: float, *, even: bool = True) -> dict[str, Any]:
    return {"tokens": tokens, "even": even, "one": one, "shared": one, "split": 1.1 * one}


def tell_machines(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["machines.py", *arguments, "--tokens", "1"])
    machines.main()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "0 numbers of tokens were measured"),
        ([measured(1, 0.01, even=False)], "0 numbers of tokens were measured"),
        ([measured(8, 0.01)], "1 numbers of tokens were measured"),
        # 128 experts would take 23 ms.
        ([measured(1, 0.00143), measured(1024, 0.02)], "reading all experts would take 22.9 ms"),
        ([{"tokens": 1}], "is not what distributed.py --json writes"),
        ({"tokens": 1}, "is not what distributed.py --json writes"),
    ],
)
def test_measurements_that_give_no_times_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rows: Any,
    message: str,
) -> None:
    (tmp_path / "measured.json").write_text(json.dumps(rows))
    with pytest.raises(SystemExit):
        tell_machines(monkeypatch, str(tmp_path / "measured.json"))
    assert message in capsys.readouterr().err


def test_machines_on_paper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "measured.json")
    with pytest.raises(SystemExit):
        tell_machines(monkeypatch, path)
    assert "No such file" in capsys.readouterr().err
    Path(path).write_text(json.dumps([measured(1, 0.00143), measured(1024, 0.0688)]))
    tell_machines(monkeypatch, path)
    assert "expert 178.8 us, row 5.61 us" in capsys.readouterr().out
    for speed in ("0", "-1", "nan"):
        with pytest.raises(SystemExit):
            tell_machines(monkeypatch, path, f"--speed={speed}")
        assert "it must be above 0" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["machines.py", path, "--tokens", "8", "0"])
    with pytest.raises(SystemExit):
        machines.main()
    assert "--tokens 0: it must be at least 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("-b BF16 -b AMXINT8 --threads 1 --cells 1", "--cells 1: they are dealt to 2 pairs"),
        ("-b NOPE --threads 1", "NOPE"),
        ("-b BF16 --threads 1 --shape nope", "no shape 'nope'"),
        ("-b BF16 --threads 1 --experts 1", "so 1 are too few"),
        ("-b BF16 --threads 100000", "100000 threads are more than"),
    ],
)
def test_cells_that_cannot_be_computed_are_refused_before_any_is(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: str,
    message: str,
) -> None:
    def compare(*_: Any) -> Any:
        raise AssertionError("measures")

    monkeypatch.setattr(cost, "compare", compare)
    with pytest.raises(SystemExit) as ended:
        cost.main(options.split())
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--turns", "--prompt", "--threads"])
def test_numbers_below_one_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["whole.py", "model", option, "0"])
    with pytest.raises(SystemExit):
        whole.main()
    assert f"{option} 0: it must be at least 1" in capsys.readouterr().err
