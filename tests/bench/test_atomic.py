"""A file is whole or not there; whoever reads while others write sees one of the whole ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench.atomic import replacing


def test_a_writer_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    # Half-written .tmp files used to stay beside traces and profiles on a full disk.
    path = tmp_path / "runs.csv"
    path.write_text("old")

    def fail() -> None:
        with replacing(path) as temporary:
            temporary.write_text("half")
            Path("/dev/full").write_text("more")

    with pytest.raises(OSError, match="No space left"):
        fail()
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("runs.csv", "old")]


def test_a_reader_never_sees_half(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text("0" * 200_000)
    code = (
        "import sys; from pathlib import Path; from bench.atomic import replacing\n"
        "for digit in sys.argv[2] * 30:\n"
        "    with replacing(Path(sys.argv[1])) as temporary:\n"
        "        temporary.write_text(digit * 200_000)"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, str(path), digits]) for digits in ("12", "34")]
    seen = set()
    while any(writer.poll() is None for writer in writers):
        text = path.read_text()
        assert len(text) == 200_000
        assert len(set(text)) == 1
        seen.add(text[0])
    assert [writer.returncode for writer in writers] == [0, 0]
    assert len(seen) > 1
    assert [p.name for p in tmp_path.iterdir()] == ["runs.csv"]
