"""The roofline as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ktk.bench.records import Result
from ktk.bench.report import names_of


def require_matplotlib() -> None:
    """Raise an ImportError that says what to install, before anything is measured."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError("--plot needs matplotlib: pip install 'ktk[plot]'") from error


def check_plot(path: Path) -> None:
    """Refuse a file that `draw_roofline` could not write, before anything is measured.

    Raises
    ------
    ImportError
        There is no matplotlib.
    ValueError
        The suffix means no kind of picture, or the file cannot be written there.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {path.parent}")
    if path.is_dir():
        raise ValueError(f"{path} is a folder")
    # The last one wants LaTeX, and says so when all has been measured.
    known = FigureCanvasAgg.get_supported_filetypes().keys() - {"pgf"}
    if path.suffix and path.suffix[1:].lower() not in known:
        raise ValueError(f"{path.suffix} is no picture; known: {', '.join(sorted(known))}")
    path = path if path.suffix else path.with_suffix(".png")  # as savefig does
    # Tried, because root may write anywhere, but not in a file system that is read-only.
    is_new = not path.exists()
    try:
        path.open("ab").close()
        if is_new:
            path.resolve().unlink()
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror}") from error


def draw_roofline(results: Sequence[Result], path: Path) -> None:
    """Write a picture: rate over operations per byte of weights, under the roofs of the units.

    Each line is of one backend, variant, format and shape. Results whose fraction means nothing are
    left out, and the title says how many.
    """
    require_matplotlib()
    sound = [result for result in results if result.fraction is not None]
    left_out = len(results) - len(sound)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_xscale("log")
    axes.set_yscale("log")
    names, shapes = names_of(results), list(dict.fromkeys(r.shape for r in results))
    series: dict[tuple[str, str, str, str], list[Result]] = {}
    for r in sound:
        series.setdefault((r.backend, r.variant, r.format, r.shape), []).append(r)
    intensities = [_intensity(result) for result in results]
    read = max(result.read_gb_per_s for result in results)
    roofs: dict[str, float] = {}
    for r in results:
        if r.peak_unit:
            roofs[r.peak_unit] = max(r.peak_gflop_per_s, roofs.get(r.peak_unit, 0.0))
    corners = [peak / read for peak in roofs.values()]
    left, right = min(intensities) / 2, 3 * max([*intensities, *corners])
    axes.set_xlim(left, right)
    for unit, peak in roofs.items():
        axes.plot([peak / read, right], [peak, peak], color="0.5", linewidth=1)
        axes.annotate(
            f"{unit}: {peak:,.0f} GFLOP/s ",
            (right, peak),
            ha="right",
            va="bottom",
            fontsize=8,
            color="0.3",
        )
    top = max(corners, default=right)
    axes.plot([left, top], [left * read, top * read], color="0.5", linewidth=1)
    axes.text(
        left * 1.3,
        left * 1.3 * read * 1.1,
        f"reading memory: {read:.1f} GB/s",
        rotation=45,
        rotation_mode="anchor",
        transform_rotates_text=True,
        fontsize=8,
        color="0.3",
    )
    for points in series.values():
        points.sort(key=_intensity)
        first = points[0]
        shape = f", {first.shape}" if len(shapes) > 1 else ""
        line = axes.plot(
            [_intensity(p) for p in points],
            [_height(p) for p in points],
            marker="o",
            label=f"{names[first]} {first.variant}{shape}",
        )[0]
        for p in points:
            axes.annotate(
                f"{p.tokens}",
                (_intensity(p), _height(p)),
                textcoords="offset points",
                xytext=(0, -12),
                ha="center",
                fontsize=7,
                color=line.get_color(),
            )
    axes.set_xlabel("operations per byte of packed weights read")
    axes.set_ylabel("GFLOP/s")
    title = f"{', '.join(shapes)}, {results[0].threads} threads (numbers: tokens)"
    if left_out:
        title += f"\nleft out, because the machine was not steady or not read: {left_out}"
    axes.set_title(title)
    if series:
        axes.legend(loc="lower right")
    axes.grid(visible=True, which="both", linewidth=0.3)
    figure.savefig(path, dpi=150)


def _height(result: Result) -> float:
    """Return the rate; of one within the error of its limit, the limit."""
    return result.gflop_per_s / max(1.0, result.fraction or 0.0)


def _intensity(result: Result) -> float:
    return result.gflop_per_s / result.gb_per_s
