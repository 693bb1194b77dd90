"""The figures of a report.  A ``Figure`` is plain data of what is plotted; drawing it is another step."""

from __future__ import annotations

import io
import math
import textwrap
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bench.report.data import ACCOUNT, PEAKS, Cell, Setting, Stat, Study
from bench.report.tables import CPU, MIB, WORDS, cell_label, pipelined

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["FORMATS", "Bar", "Figure", "Point", "Series", "figures", "render"]

FORMATS = ("png", "svg", "pdf")

# Okabe and Ito's colours, told apart by readers with any colour vision; markers and dashes say it again.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
MARKERS = "osD^vPX*"
DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)), (0, (5, 3)))
HATCHES = ("", "///", "\\\\\\", "---", "xx", "|||")  # lines alone: dots make an SVG many times larger
PART_COLOURS = ("#0072B2", "#E69F00", "#CC79A7", "#009E73", "#56B4E9", "#999999")
WIDTH = 3.3  # inches: a column of a two-column page
# So many lines can be told apart, so many bars be read; the rest stands in further figures.
LINES, BARS = 8, 28
LINE = 0.125  # inches: a line of a legend or a title
LABEL = 28  # characters that a label has beside a bar, or in a legend of two columns

_STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 7,
    "axes.titlesize": 7,
    "axes.labelsize": 7,
    "xtick.labelsize": 6.5,
    "ytick.labelsize": 6.5,
    "legend.fontsize": 6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.5,
    "axes.axisbelow": True,
    "lines.linewidth": 1.1,
    "lines.markersize": 4,
    "hatch.linewidth": 0.4,
    "svg.fonttype": "none",
    "svg.hashsalt": "pipeline-bench",  # or ids would differ each time
    "pdf.fonttype": 42,
    "text.parse_math": False,  # a name may hold a dollar sign
}


@dataclass(frozen=True)
class Point:
    """A cell in a figure; ``stat`` is None where it has no figure, and ``why`` how it ended, where it failed."""

    x: float
    stat: Stat | None
    why: str = ""


@dataclass(frozen=True)
class Series:
    """Points by x, one for every x of the figure at which the cell was run.

    ``breaks``: the x of the figure between its own points at which it has none; no line crosses them.
    ``joined`` is false where two cells stand at the same x, or x has no order.
    """

    label: str
    points: tuple[Point, ...]
    breaks: tuple[float, ...] = ()
    joined: bool = True


@dataclass(frozen=True)
class Bar:
    """A bar of stacked parts by name; None is a part that is not known."""

    label: str
    parts: tuple[tuple[str, float | None], ...]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """``name`` is its file's; exactly one of ``series`` and ``bars`` is not empty.

    ``ideal`` draws y = x.  ``ticks`` names the x of a figure whose x is no number.
    """

    name: str
    kind: Literal["lines", "bars"]
    caption: str
    title: str
    x_label: str
    y_label: str = ""
    series: tuple[Series, ...] = ()
    bars: tuple[Bar, ...] = ()
    ideal: bool = False
    ticks: tuple[str, ...] = ()
    cpu: bool = False
    synthetic: bool = False
    cells: tuple[Cell, ...] = ()


def _series(
    cells: Sequence[Cell], x: Callable[[Cell], float], y: Callable[[Cell], Stat | None], without: Sequence[str]
) -> list[tuple[Series, tuple[Cell, ...]]]:
    """One for each label, with its cells; ``without`` is what x says."""
    by_label: dict[str, list[Cell]] = {}
    for c in cells:
        by_label.setdefault(cell_label(c, cells, without=[*without, "balance"]) + _rule(c, cells), []).append(c)
    at = sorted({x(c) for c in cells})
    result = []
    for label, of in sorted(by_label.items()):
        points = [_point(c, x(c), y(c)) for c in of]
        points.sort(key=lambda p: p.x)
        have = [p.x for p in points if p.stat]
        breaks = tuple(v for v in at if have and min(have) < v < max(have) and v not in have)
        joined = len({p.x for p in points}) == len(points)
        result.append((Series(label, tuple(points), breaks, joined), tuple(of)))
    return result


def _point(cell: Cell, x: float, y: Stat | None) -> Point:
    return Point(x, y, WORDS[cell.status] if cell.status != "ok" else "")


def _rule(cell: Cell, cells: Sequence[Cell]) -> str:
    """The balance's rule, where it tells cells apart; the boundaries go with p and need no saying."""
    rules = {(c.head.balance, c.head.balance_options) for c in cells if pipelined(c.head)}
    r = cell.head
    return f" {r.balance} {r.balance_options}".rstrip() if len(rules) > 1 and pipelined(r) else ""


def _chunks(items: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [items[i : i + size] for i in range(0, len(items), size)]


def _bars_of(text: str) -> str:
    return (
        f"{text}; bars: as in the table, the interval over five trials or more, the range of fewer, "
        "or the interval of the steps of one. × stands for a cell that failed"
    )


def _lines(
    setting: Setting,
    name: str,
    caption: str,
    made: Sequence[tuple[Series, tuple[Cell, ...]]],
    **more: Any,
) -> list[Figure]:
    """As many figures as the lines need; none where there is no point."""
    having = [(s, c) for s, c in made if any(p.stat for p in s.points)]
    chunks = _chunks(having, LINES)
    return [
        Figure(
            name=f"{name}-{setting.name.lower()}{f'-{i}' if len(chunks) > 1 else ''}",
            kind="lines",
            caption=f"{_bars_of(caption)} ({setting.name}: {setting.label})",
            series=tuple(s for s, _ in chunk),
            cells=tuple(c for _, of in chunk for c in of),
            cpu=setting.head.device == "cpu",
            synthetic=setting.head.synthetic,
            **more,
        )
        for i, chunk in enumerate(chunks, 1)
    ]


def _by(cells: Iterable[Cell], key: Callable[[Cell], int]) -> list[tuple[int, list[Cell]]]:
    return [(k, list(of)) for k, of in groupby(sorted(cells, key=key), key)]


def _speedup(setting: Setting) -> list[Figure]:
    """Speed-up against stages, at each number of micro-batches."""
    found = []
    for m, cells in _by(setting.cells, lambda c: c.head.micro_batches):
        made = _series(cells, lambda c: c.head.stages, lambda c: c.speedup, ("p", "m"))
        title = f"{setting.head.model}, m={m}, {setting.head.hardware}"
        found += _lines(
            setting,
            f"1-speedup-m{m}",
            f"Speed-up against stages at m={m}",
            made,
            title=title,
            x_label="stages p",
            y_label="speed-up",
            ideal=True,
        )
    return found


def _throughput(setting: Setting) -> list[Figure]:
    """Throughput against micro-batches, at each number of stages."""
    found = []
    for p, cells in _by(setting.cells, lambda c: c.head.stages):
        made = _series(cells, lambda c: c.head.micro_batches, lambda c: c.throughput, ("p", "m"))
        title = f"{setting.head.model}, p={p}, {setting.head.hardware}"
        found += _lines(
            setting,
            f"2-throughput-p{p}",
            f"Throughput against micro-batches at p={p}",
            made,
            title=title,
            x_label="micro-batches m",
            y_label="samples/s",
        )
    return found


def _balance(setting: Setting) -> list[Figure]:
    """Throughput of each balance; its rules have no order, so no line joins them."""
    found = []
    pipelines = [c for c in setting.cells if pipelined(c.head) and c.head.stages > 1]
    for m, cells in _by(pipelines, lambda c: c.head.micro_batches):
        rules = sorted({f"{c.head.balance} {c.head.balance_options}".strip() for c in cells})
        if len(rules) < 2:
            continue
        by_label: dict[str, list[Cell]] = {}
        for c in cells:
            by_label.setdefault(cell_label(c, cells, without=("m", "balance")), []).append(c)
        made = []
        for label, of in sorted(by_label.items()):
            points = tuple(
                _point(c, rules.index(f"{c.head.balance} {c.head.balance_options}".strip()), c.throughput) for c in of
            )
            made.append((Series(label, points, joined=False), tuple(of)))
        found += _lines(
            setting,
            f"5-balance-m{m}",
            f"Throughput of each balance at m={m}",
            made,
            title=f"{setting.head.model}, m={m}, {setting.head.hardware}",
            x_label="balance",
            y_label="samples/s",
            ticks=tuple(rules),
        )
    return found


def _stacked(
    setting: Setting, name: str, caption: str, x_label: str, made: Sequence[tuple[Cell, Sequence[Bar]]]
) -> list[Figure]:
    """As many figures as the bars need; a cell's bars stay together."""
    pages: list[list[tuple[Cell, Sequence[Bar]]]] = [[]]
    for item in made:
        if pages[-1] and sum(len(bars) for _, bars in pages[-1]) + len(item[1]) > BARS:
            pages.append([])
        pages[-1].append(item)
    return [
        Figure(
            name=f"{name}-{setting.name.lower()}{f'-{i}' if len(pages) > 1 else ''}",
            kind="bars",
            caption=f"{caption} ({setting.name}: {setting.label})",
            title=f"{setting.head.model}, {setting.head.hardware}",
            x_label=x_label,
            bars=tuple(b for _, bars in page for b in bars),
            cells=tuple(c for c, _ in page),
            cpu=setting.head.device == "cpu",
            synthetic=setting.head.synthetic,
        )
        for i, page in enumerate(pages, 1)
        if page
    ]


def _memory(setting: Setting) -> list[Figure]:
    """The peak of each stage and its parts, of the trial with the highest peak."""
    made = []
    for c in setting.cells:
        run = c.fullest
        if run is None:
            continue
        bars = []
        for s in run.devices:
            sizes = {name: getattr(s, name) for name in PEAKS}
            if all(v is None for v in sizes.values()):  # the peak alone is known
                sizes = {"peak_allocated_bytes": s.peak_allocated_bytes}
            parts = tuple((_part(k), None if v is None else v / MIB) for k, v in sizes.items())
            bars.append(Bar(f"{cell_label(c, setting.cells)} stage {s.stage}", parts))
        made.append((c, bars))
    return _stacked(setting, "3-memory", "Peak memory of each stage", "MiB", made)


def _part(column: str) -> str:
    return column.removeprefix("peak_").removesuffix("_bytes").replace("_", " ")


def _lost_time(setting: Setting) -> list[Figure]:
    """The parts of the traced step in per cent of it."""
    made = []
    for c in setting.cells:
        if c.account is not None:
            parts = tuple((name.removesuffix("_s"), c.account[name]) for name in ACCOUNT)
            made.append((c, [Bar(cell_label(c, setting.cells), parts)]))
    return _stacked(setting, "4-lost-time", "Where the time of a step went", "% of the traced step", made)


def figures(study: Study) -> list[Figure]:
    """All figures of a study by name."""
    makers = (_speedup, _throughput, _memory, _lost_time, _balance)
    return [figure for make in makers for setting in study.settings for figure in make(setting)]


def _draw_lines(axes: Axes, figure: Figure) -> None:
    xs = sorted({p.x for s in figure.series for p in s.points})
    # Error bars of neighbours would hide each other.
    gap = min((b - a for a, b in pairwise(xs)), default=1.0)
    for i, s in enumerate(figure.series):
        shift = 0.06 * gap * (i - (len(figure.series) - 1) / 2)
        seen = [p for p in s.points if p.stat]
        stats = [p.stat for p in seen if p.stat]
        x, y = [p.x + shift for p in seen], [t.value for t in stats]
        low_high = [[t.value - t.low for t in stats], [t.high - t.value for t in stats]]
        look: dict[str, Any] = {"color": COLOURS[i % LINES], "marker": MARKERS[i % LINES]}
        axes.errorbar(
            x, y, yerr=low_high, linestyle="none", capsize=1.5, elinewidth=0.7, label=_visible(s.label), **look
        )
        if s.joined:
            places = sorted([*zip(x, y, strict=True), *((b + shift, float("nan")) for b in s.breaks)])
            axes.plot(*zip(*places, strict=True), color=look["color"], linestyle=DASHES[i % LINES])
        failed = [p.x + shift for p in s.points if p.why]
        if failed:  # an empty line that is not clipped would have a place in the layout
            axes.plot(failed, [0] * len(failed), "x", color=look["color"], clip_on=False, zorder=5)
    axes.set_ylim(bottom=0)
    if figure.ticks:
        axes.set_xticks(range(len(figure.ticks)), [_folded(t, 20) for t in figure.ticks], rotation=30, ha="right")
        axes.margins(x=0.15)
    else:
        axes.set_xticks(xs, [f"{x:g}" for x in xs])
    if figure.ideal:
        line = [min(xs), max(xs)]
        top = axes.get_ylim()[1]
        axes.plot(line, line, color="#666666", linewidth=0.8, linestyle=(0, (1, 2)), label="ideal")
        # A long ideal line must not press the others to the floor.
        axes.set_ylim(0, max(top, min(max(xs) * 1.05, 2 * top)))
    axes.set_ylabel(figure.y_label)


def _draw_bars(axes: Axes, figure: Figure) -> None:
    names = list(dict.fromkeys(name for bar in figure.bars for name, _ in bar.parts))
    places = range(len(figure.bars))
    above, below = [0.0] * len(figure.bars), [0.0] * len(figure.bars)
    for i, name in enumerate(names):
        values = [dict(bar.parts).get(name) or 0.0 for bar in figure.bars]
        # What is less than nothing (a part of a prediction that was too long) goes the other way.
        starts = [above[k] if v >= 0 else below[k] for k, v in enumerate(values)]
        axes.barh(
            places,
            values,
            left=starts,
            height=0.7,
            label=name,
            color=PART_COLOURS[i % len(PART_COLOURS)],
            hatch=HATCHES[i % len(HATCHES)],
            edgecolor="white",
            linewidth=0.3,
        )
        above = [a + max(v, 0) for a, v in zip(above, values, strict=True)]
        below = [b + min(v, 0) for b, v in zip(below, values, strict=True)]
    axes.set_yticks(places, [_folded(bar.label) for bar in figure.bars])
    axes.set_ylim(len(figure.bars) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)


def render(figure: Figure, folder: Path) -> list[Path]:
    """Write the figure in each of ``FORMATS``; the same figure gives the same bytes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # a script that the font lacks: boxes, and that is all
        lines = figure.kind == "lines"
        labels = [s.label for s in figure.series] if lines else list(dict(p for b in figure.bars for p in b.parts))
        columns = 2 if max(map(len, labels)) <= LABEL else 1
        title = "\n".join([*textwrap.wrap(" ".join(figure.title.split()), 60), *([CPU] if figure.cpu else [])])
        body = 1.8 if lines else 0.95 + 0.16 * sum(1 + _folded(b.label).count("\n") * 0.7 for b in figure.bars)
        entries = len(labels) + figure.ideal
        legend = LINE * (math.ceil(entries / columns) + sum(_folded(text, 60).count("\n") for text in labels) + 0.5)
        head = LINE * (title.count("\n") + 1.5)
        height = body + legend + head
        canvas, axes = pyplot.subplots(figsize=(WIDTH, height), layout="constrained")
        # Room for the legend and the title, which then lie outside of it.
        canvas.set_layout_engine("constrained", rect=(0, legend / height, 1, body / height))
        (_draw_lines if lines else _draw_bars)(axes, figure)
        axes.set_xlabel(figure.x_label)
        canvas.text(0.5, 1 - 0.04 / height, title, ha="center", va="top", fontsize=7)
        handles, labels = axes.get_legend_handles_labels()
        folded = [_folded(label, 60) for label in labels]
        canvas.legend(handles, folded, loc="lower center", ncols=columns, frameon=False)
        if figure.synthetic:
            mark: dict[str, Any] = {"fontsize": 26, "color": "#cc0000", "alpha": 0.3, "rotation": 25, "weight": "bold"}
            axes.text(0.5, 0.5, "SYNTHETIC", transform=axes.transAxes, ha="center", va="center", zorder=9, **mark)
        # The layout once, not once for each format.
        canvas.draw_without_rendering()
        canvas.set_layout_engine("none")
        paths = []
        for kind in FORMATS:
            metadata: dict[str, Any] = {
                "png": {"Software": None},
                "svg": {"Date": None, "Creator": None},
                "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
            }[kind]
            out = io.BytesIO()
            canvas.savefig(out, format=kind, dpi=300, metadata=metadata)
            path = folder / f"{figure.name}.{kind}"
            path.write_bytes(out.getvalue())
            paths.append(path)
        pyplot.close(canvas)
    return paths


def _visible(label: str) -> str:
    """Matplotlib leaves out of a legend what begins with an underscore."""
    return " " + label if label.startswith("_") else label


def _folded(label: str, width: int = LABEL) -> str:
    """In lines, so that a long name leaves room for what is plotted; at most three."""
    return "\n".join(textwrap.wrap(label, width, max_lines=3, placeholder="…")) or " "
