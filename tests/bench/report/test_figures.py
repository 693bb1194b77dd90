"""Figures by the data they plot: the tables' figures, no line across what failed, said where it must be."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd
import pytest

from bench.report.data import load
from bench.report.figures import FORMATS, Figure, figures, render


@pytest.fixture(scope="module")
def drawn(made: Path) -> dict[str, Figure]:
    return {f.name: f for f in figures(load(made))}


def _series(found: dict[str, Figure], prefix: str, label: str) -> tuple[Figure, int]:
    """The figure, among those whose name begins so, that has the series, and its place there."""
    for name, figure in found.items():
        for i, s in enumerate(figure.series):
            if name.startswith(prefix) and s.label.startswith(label):
                return figure, i
    raise AssertionError(f"no {label} in {prefix}")


def _table(made: Path, name: str) -> pd.DataFrame:
    return pd.read_csv(made / "tables" / f"{name}.csv")


def test_speedup_is_the_tables(made: Path, drawn: dict[str, Figure]) -> None:
    table = _table(made, "2-throughput-s1-m4")
    figure, i = _series(drawn, "1-speedup-m4-s1", "torch 1f1b uniform")
    assert figure.ideal
    for point in figure.series[i].points:
        row = table[(table["library"] == "torch") & (table["p"] == point.x) & (table["schedule"] == "1f1b")]
        row = row[row["balance"].isna() | row["balance"].str.startswith("uniform", na=False)].iloc[0]
        assert point.stat is not None
        assert point.stat.value == pytest.approx(float(row["speed-up"]))
        assert point.stat.low == pytest.approx(float(row["speed-up low"]))
        assert point.stat.high == pytest.approx(float(row["speed-up high"]))
    assert [p.x for p in figure.series[i].points] == [1, 2, 4]


def test_no_line_crosses_a_failed_or_missing_cell(drawn: dict[str, Figure]) -> None:
    figure, i = _series(drawn, "1-speedup-m4-s1", "deepspeed")
    series = figure.series[i]
    assert [(p.x, p.why) for p in series.points] == [(1, ""), (2, "OOM"), (4, "")]
    assert series.breaks == (2,)
    axes = _drawn_axes(figure)
    (line,) = [x for x in axes.lines if len(x.get_xdata()) == 3 and x.get_ydata()[1] != x.get_ydata()[1]]
    assert line.get_ydata()[0] == series.points[0].stat.value  # type: ignore[union-attr]
    # What is missing altogether breaks a line as well.
    figure, i = _series(drawn, "2-throughput-p1-s1", "single")
    assert figure.series[i].breaks == ()
    figure, i = _series(drawn, "2-throughput-p2-s1", "torch 1f1b uniform")
    assert [p.x for p in figure.series[i].points] == [2, 4, 8]


def _drawn_axes(figure: Figure):  # type: ignore[no-untyped-def]
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from bench.report.figures import _draw_lines

    _, axes = pyplot.subplots()
    _draw_lines(axes, figure)
    pyplot.close("all")
    return axes


def test_a_failed_parity_is_never_plotted(drawn: dict[str, Figure]) -> None:
    for figure in drawn.values():
        for s in figure.series:
            for p in s.points:
                assert p.why != "parity failed" or p.stat is None
    figure, i = _series(drawn, "1-speedup-m4-s1", "fairscale")
    assert [(p.x, p.why) for p in figure.series[i].points] == [(2, "parity failed"), (4, "")]


def test_bars_are_the_tables(made: Path, drawn: dict[str, Figure]) -> None:
    table = _table(made, "5-memory-s1")
    bars = [b for name, f in drawn.items() if name.startswith("3-memory-s1") for b in f.bars]
    peaks = pd.to_numeric(table["peak MiB"], errors="coerce").dropna()
    assert len(bars) == len(peaks)
    assert sorted(sum(v or 0 for _, v in b.parts) for b in bars) == pytest.approx(sorted(peaks))
    lost = [b for name, f in drawn.items() if name.startswith("4-lost-time-s1") for b in f.bars]
    assert len(lost) == len(_table(made, "6-lost-time-s1"))
    for b in lost:
        assert sum(v or 0 for _, v in b.parts) == pytest.approx(100)


def test_balance_has_no_line(drawn: dict[str, Figure]) -> None:
    figure = drawn["5-balance-m4-s1"]
    assert figure.ticks == ("parameters", "time", "uniform")
    assert not any(s.joined for s in figure.series)


def test_hardware_is_never_mixed(drawn: dict[str, Figure]) -> None:
    for figure in drawn.values():
        assert len({(c.head.hardware, c.head.batch_size) for c in figure.cells}) == 1


def test_many_lines_and_bars_make_further_figures(drawn: dict[str, Figure]) -> None:
    assert all(len(f.series) <= 8 for f in drawn.values())
    assert all(len(f.bars) <= 28 for f in drawn.values())
    assert {"3-memory-s1-1", "3-memory-s1-2"} <= drawn.keys()


def test_every_figure_is_there_and_says_what_it_must(made: Path, drawn: dict[str, Figure]) -> None:
    for name in drawn:
        for kind in FORMATS:
            assert (made / "figures" / f"{name}.{kind}").stat().st_size > 1000
        svg = (made / "figures" / f"{name}.svg").read_text()
        assert "SYNTHETIC" in svg
        assert ("CPU: says nothing about GPUs" in svg) == ("cpu-made-up" in svg)
        width = re.search(r'width="([\d.]+)pt"', svg)
        assert width is not None
        assert float(width[1]) == pytest.approx(3.3 * 72, abs=1)


def test_odd_names_are_drawn_as_they_are(odd: Path) -> None:
    texts = [path.read_text() for path in (odd / "figures").glob("*.svg")]
    assert texts
    assert any("&lt;script&gt;" in text and "$x^2$" in text for text in texts)
    assert not any("<script>" in text for text in texts)


def test_the_same_figure_gives_the_same_bytes(made: Path, drawn: dict[str, Figure], tmp_path: Path) -> None:
    for name in ("1-speedup-m1-s1", "4-lost-time-s1"):
        for path in render(drawn[name], tmp_path):
            assert path.read_bytes() == (made / "figures" / path.name).read_bytes()
