"""A profile is a file that people can read and that comes back as it was written."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.partition.profile import (
    LayerProfile,
    Profile,
    ProfileKey,
    profile_key,
    profile_path,
    read_profile,
    write_profile,
)
from bench.partition.simulate import Schedule
from tests.bench.partition.made import KEY, LAYER

counts, seconds = st.integers(0, 2**60), st.floats(0, 1e6)
layers = st.builds(
    LayerProfile,
    layer=counts,
    kind=st.text(st.characters(exclude_categories=["Cs", "Cc"])).map(str.strip),
    **{f.name: counts if f.type == "int" else seconds for f in dataclasses.fields(LayerProfile)[2:]},
)


@settings(max_examples=50)
@given(st.lists(layers, min_size=1, max_size=4), seconds, st.floats(1, math.inf))
def test_a_profile_comes_back_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, rows: list[LayerProfile], latency: float, bandwidth: float
) -> None:
    path = tmp_path_factory.mktemp("profiles") / "deep" / "one.csv"
    made = Profile(
        key=KEY, layers=tuple(rows), link_latency_s=latency, link_bytes_per_s=bandwidth, processes=2, repetitions=5
    )
    write_profile(made, path)
    assert read_profile(path) == made
    assert [p.name for p in path.parent.iterdir()] == ["one.csv"]


def test_pandas_reads_it(tmp_path: Path) -> None:
    write_profile(Profile(key=KEY, layers=(LAYER, LAYER)), tmp_path / "p.csv")
    table = pd.read_csv(tmp_path / "p.csv", comment="#")
    assert table.forward_s.tolist() == [1.0, 1.0]
    assert "# hardware: cpu-made-up" in (tmp_path / "p.csv").read_text()


@pytest.mark.parametrize("text", ["", "layer,kind\n0,Linear\n", "# model: x\nlayer\nzero\n"])
def test_a_foreign_file_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "p.csv").write_text(text)
    with pytest.raises(ValueError, match=r"p\.csv: no profile"):
        read_profile(tmp_path / "p.csv")


def test_whatever_changes_a_cost_changes_the_file() -> None:
    paths = {profile_path(KEY, Path("r"))}
    for field in dataclasses.fields(ProfileKey):
        old = getattr(KEY, field.name)
        changed: Any = old + 1 if isinstance(old, int) else old + "x"
        paths.add(profile_path(dataclasses.replace(KEY, **{field.name: changed}), Path("r")))
    assert len(paths) == 1 + len(dataclasses.fields(ProfileKey))


def test_the_key_takes_the_micro_batch_and_not_how_many_there_are(made_record: Any) -> None:
    factors = made_record("one").factors
    keys = {
        profile_key(factors.replace(batch_size=2 * m, micro_batches=m, stages=p, seed=s), "", "", "")
        for m, p, s in ((1, 2, 0), (2, 2, 1), (4, 4, 2))
    }
    assert len(keys) == 1


def test_the_problem_holds_what_was_profiled() -> None:
    profile = Profile(key=KEY, layers=(LAYER, LAYER), link_latency_s=0.5, link_bytes_per_s=26)
    problem = profile.problem(2, Schedule(name="1f1b", micro_batches=3))
    # bf16: two bytes a number; boundary: latency 0.5 + 13 bytes at 26 a second.
    assert problem.input_bytes == 4 * 3 * 8 * 8 * 2
    assert problem.transfer_s[1] == 1.0
    assert problem.memory_bytes((1, 1)) == (84 + 2 * (11 + 5), 84 + 1 * (11 + 5))
    assert profile.costs("flops") == [300, 300]
    assert profile.costs("time") == [3, 3]
