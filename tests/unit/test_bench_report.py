"""What `ktk bench` says of its results: doubts, notes of the table, and the plot."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ktk.bench.records import Result
from ktk.bench.report import results_table
from ktk.bench.verdict import doubt

STEADY = {"limits": [40e9, 41e9, 40.5e9], "others": [0.0, 0.01, 0.3], "noise": 0.05}


@pytest.mark.parametrize(
    ("fraction", "changed", "why"),
    [
        (0.9, {}, ""),
        (1.1, {}, ""),
        (1.11, {}, "weights came from a cache"),
        (10.28, {}, "weights came from a cache"),
        (0.9, {"others": [0.06, 0.0, 0.36]}, "other processes took 6% of the CPUs"),
        (0.9, {"others": [0.9, 1.0, 1.0], "noise": 1.0}, ""),
        (0.9, {"limits": [40e9, 20e9, 40e9]}, "the machine's limit changed by a factor of 2.0"),
    ],
)
def test_a_fraction_is_doubted(fraction: float, changed: dict[str, object], why: str) -> None:
    found = doubt(fraction, **{**STEADY, **changed})  # type: ignore[arg-type]
    assert (why in found) if why else not found


def result(**changed: object) -> Result:
    fields: dict[str, object] = {
        "backend": "BF16", "variant": "avx512_bf16", "shape": "tiny", "tokens": 1, "threads": 2,
        "seconds": 1e-3, "gb_per_s": 30.0, "gflop_per_s": 30.0, "limit_seconds": 9e-4,
        "fraction": 0.9, "doubt": None, "bound": "memory", "read_gb_per_s": 33.3,
        "peak_gflop_per_s": 500.0, "peak_unit": "avx512_bf16", "spread": 0.1, "others": 0.0,
        "experts_hit": 8.0, "layers": 3, "rotated_gb": 1.0, "format": "bf16",
    }  # fmt: skip
    return Result(**{**fields, **changed})  # type: ignore[arg-type]


@pytest.mark.parametrize("width", [40, 80])
@pytest.mark.parametrize("of_model", [{}, {"model_layers": 48, "experts_tokens_per_s": 20.83}])
def test_a_doubtful_fraction_is_a_dash_with_its_reason(
    width: int, of_model: dict[str, float]
) -> None:
    why = "other processes took 36% of the CPUs"
    doubtful = result(fraction=None, doubt=why, tokens=2048, backend="LLAMAFILE", **of_model)
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(results_table([result(**of_model), doubtful], width=width))
    text = console.export_text()
    assert "…" not in text, "something was cut off"
    assert max(map(len, text.splitlines())) <= width
    words = " ".join(text.split())
    assert f"reached -: {why}" in words
    assert "90%" in words
    [row] = [line.split() for line in text.splitlines() if line.split()[:1] == ["LLAMAFILE"]]
    assert "-" in row
    assert ("20.8" in words and "experts only" in words) == bool(of_model)


def test_notes_say_the_least_of_layers_and_which_format_is_doubted() -> None:
    doubtful = result(format="e4m3-f32-row", fraction=None, doubt="noise", layers=2)
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(results_table([result(format="e4m3-f32-128x128", layers=9), doubtful]))
    words = " ".join(console.export_text().split())
    assert "2 or more layers rotated" in words
    assert "reached -: noise (BF16 row avx512_bf16 T=1)" in words


def test_no_point_is_drawn_above_the_roof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib.axes

    from ktk.bench.plot import draw_roofline

    drawn: list[tuple[float, float]] = []
    plot = matplotlib.axes.Axes.plot

    def spy(axes: object, x: list[float], y: list[float], **style: object) -> object:
        if style.get("marker"):
            drawn.extend(zip(x, y, strict=True))
        return plot(axes, x, y, **style)  # type: ignore[arg-type]

    monkeypatch.setattr(matplotlib.axes.Axes, "plot", spy)
    fast = result(tokens=4, fraction=1.05, gb_per_s=35.0, gflop_per_s=140.0, limit_seconds=1.05e-3)
    absurd = result(tokens=2, fraction=None, doubt="cache", gb_per_s=300.0, gflop_per_s=600.0)
    draw_roofline([result(), fast, absurd], tmp_path / "a.png")
    assert len(drawn) == 2, "the one that means nothing is left out"
    for intensity, rate in drawn:
        assert rate <= 1.0001 * min(33.34 * intensity, 500.0)
    draw_roofline([absurd], tmp_path / "b.png")
    assert (tmp_path / "b.png").exists()


def test_formats_and_shapes_are_lines_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import matplotlib.axes

    from ktk.bench.plot import draw_roofline

    lines: dict[str, list[float]] = {}
    titles: list[str] = []
    plot = matplotlib.axes.Axes.plot

    def spy(axes: object, x: list[float], y: list[float], **style: Any) -> object:
        if "label" in style:
            lines[style["label"]] = y
        return plot(axes, x, y, **style)  # type: ignore[arg-type]

    monkeypatch.setattr(matplotlib.axes.Axes, "plot", spy)
    monkeypatch.setattr(matplotlib.axes.Axes, "set_title", lambda _, title: titles.append(title))
    found = [
        result(gflop_per_s=rate, format=fmt, shape=shape, backend="AMXINT4", variant="avx2")
        for rate, (fmt, shape) in enumerate(
            [("u4-bf16-g32", "tiny"), ("u4-bf16-row", "tiny"), ("u4-bf16-g32", "large")], 1
        )
    ]
    draw_roofline(found, tmp_path / "a.png")
    assert lines == {
        "AMXINT4 g32 avx2, tiny": [1],
        "AMXINT4 row avx2, tiny": [2],
        "AMXINT4 g32 avx2, large": [3],
    }
    assert titles == ["tiny, large, 2 threads (numbers: tokens)"]


def test_a_picture_is_tried_and_nothing_is_left_behind(tmp_path: Path) -> None:
    from ktk.bench.plot import check_plot

    check_plot(tmp_path / "new.svg")
    check_plot(tmp_path / "new")
    assert not list(tmp_path.iterdir())
    old = tmp_path / "old.png"
    old.write_bytes(b"a picture")
    check_plot(old)
    assert old.read_bytes() == b"a picture"
    with pytest.raises(ValueError, match="is a folder"):
        check_plot(tmp_path)
    with pytest.raises(ValueError, match=r"\.pgf is no picture"):
        check_plot(tmp_path / "new.pgf")


def test_missing_matplotlib_is_named() -> None:
    script = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "sys.argv = ['ktk', 'bench', '--plot', 'x.png']\n"
        "from ktk.__main__ import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 1
    assert "pip install 'ktk[plot]'" in done.stderr
