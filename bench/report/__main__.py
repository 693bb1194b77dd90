"""The report of a study: ``python -m bench.report [RESULTS_DIR]``.

Reads runs.csv, stages.csv and steps.csv of the folder (``python -m bench.collect`` writes them), its traces
and published/*.csv, and writes report.html, report.md, tables/ and figures/ into it.  The same CSVs
give the same bytes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.atomic import replacing
from bench.errors import UserError
from bench.report.data import Study, load
from bench.report.figures import FORMATS, Figure, figures, render
from bench.report.html import html
from bench.report.latex import latex
from bench.report.layout import SYNTHETIC, Table, as_csv, markdown, md_text
from bench.report.published import published
from bench.report.tables import tables

__all__ = ["main", "report", "write_tables"]

# What a former report may have left; nothing else in these folders is touched.
_OURS = {"tables": r"\d-[a-z0-9-]+\.(md|tex|csv)", "figures": r"\d-[a-z0-9-]+\.(png|svg|pdf)"}


def report(results_dir: Path) -> tuple[list[Path], list[str]]:
    """Write the whole report.  Returns what was written, and one line for each trace that holds no spans."""
    study = load(results_dir)
    # Tables first: figures of a large study take their time.
    found, written = write_tables(study)
    drawn = []
    folder = _emptied(study, "figures")
    for figure in figures(study):
        paths = render(figure, folder)
        written += paths
        drawn.append((figure, paths[FORMATS.index("svg")].read_bytes()))
    written.append(_write(results_dir / "report.md", _markdown(study, found, [f for f, _ in drawn])))
    page, bad = html(study, found, drawn, _summary(study))
    written.append(_write(results_dir / "report.html", page))
    return written, bad


def write_tables(study: Study) -> tuple[list[Table], list[Path]]:
    """All tables, and the files that they were written to."""
    found = tables(study)
    if (beside := published(study)) is not None:
        found.append(beside)
    folder = _emptied(study, "tables")
    kinds = (("md", markdown), ("tex", latex), ("csv", as_csv))
    return found, [_write(folder / f"{table.name}.{kind}", text(table)) for table in found for kind, text in kinds]


def _emptied(study: Study, name: str) -> Path:
    """A folder of the report without what a former one left there."""
    folder = study.folder / name
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        if re.fullmatch(_OURS[name], path.name):
            path.unlink()
    return folder


def _summary(study: Study) -> str:
    ok = sum(r.status == "ok" for r in study.runs)
    return (
        f"{len(study.runs)} runs, {ok} of them ok, in {len(study.settings)} settings; a setting is a model with its "
        "input, mini-batch, precision, optimizer, data and seed on one hardware, and only cells of one setting stand "
        "in one table."
    )


def _markdown(study: Study, found: Sequence[Table], drawn: Sequence[Figure]) -> str:
    lines = ["# Pipeline-parallel libraries\n"]
    lines += [f"**{SYNTHETIC}**\n"] if study.synthetic else []
    lines += [f"{_summary(study)}\n", *map(markdown, found)]
    for figure in drawn:
        made_up = f"**{SYNTHETIC}** " if figure.synthetic else ""
        lines.append(f"![{md_text(figure.caption)}](figures/{figure.name}.png)\n\n{made_up}{md_text(figure.caption)}\n")
    return "\n".join(lines)


def _write(path: Path, text: str) -> Path:
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")
    return path


def main(arguments: Sequence[str]) -> int:
    """Exit code 2 for a folder without usable CSVs, 1 where a trace could not be read."""
    if any(a in ("-h", "--help") for a in arguments):
        print((__doc__ or "").strip())
        return 0
    try:
        if len(arguments) > 1:
            raise UserError(
                "results_dir", " ".join(arguments), "one folder is needed", "python -m bench.report RESULTS"
            )
        results_dir = Path(arguments[0]) if arguments else Path("results")
        try:
            written, bad = report(results_dir)
        except OSError as error:
            why = f"cannot be written ({error.strerror})"
            raise UserError("results_dir", results_dir, why, "copy it to a folder of your own") from None
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    for kind in ("tables", "figures"):
        print(f"{results_dir / kind}: {sum(p.parent.name == kind for p in written)} files")
    print(f"{results_dir / 'report.md'}\n{results_dir / 'report.html'}")
    for line in bad:
        print(line, file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
