"""How far partitioners stay from the exact optimum: the largest stage over the smallest possible one.

    python scripts/balancers.py [RESULTS_DIR]

For each library's own routine and for ours, on random costs and on the profiles that lie in RESULTS_DIR
(``python -m bench.partition model=resnet50 image_size=224 batch_size=16 results_dir=RESULTS_DIR`` measures one).
All are given the same costs: of a profile, the forward and backward time of each layer.
"""

from __future__ import annotations

import itertools
import logging
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PROJECT))


from bench.partition.profile import read_profile  # noqa: E402
from bench.partition.solver import min_max  # noqa: E402

RANDOM = ((15, 2), (15, 4), (40, 8), (100, 8))
VECTORS = 100
STAGES = (2, 4, 8)
Routine = Callable[[Sequence[float], int], list[int]]


def routines() -> dict[str, Routine]:
    """Each library's own partitioner, as numbers of layers."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    logging.disable(logging.WARNING)
    from deepspeed.runtime.utils import partition_balanced  # type: ignore[import-untyped]
    from fairscale.nn.pipe.balance import blockpartition as fairscale  # type: ignore[import-untyped]
    from torchgpipe.balance import blockpartition as torchgpipe  # type: ignore[import-untyped]

    def blocks(module: object) -> Routine:
        return lambda costs, stages: [len(b) for b in module.solve(list(costs), stages)]  # type: ignore[attr-defined]

    def balanced(costs: Sequence[float], stages: int) -> list[int]:
        return [int(b - a) for a, b in itertools.pairwise(partition_balanced(list(costs), stages))]

    return {
        "torchgpipe": blocks(torchgpipe),
        "fairscale": blocks(fairscale),
        "deepspeed": balanced,
        "ours": lambda costs, stages: list(min_max(costs, stages)),
    }


def largest(costs: Sequence[float], partition: Sequence[int]) -> float:
    """The largest stage's cost."""
    ends = [0, *itertools.accumulate(partition)]
    return max(sum(costs[a:b]) for a, b in itertools.pairwise(ends))


def smallest_possible(costs: Sequence[float], stages: int) -> float:
    """The smallest possible largest stage, by plain dynamic programming that shares no code with our solver."""
    sums = [0.0, *itertools.accumulate(costs)]
    best = list(sums)
    for _ in range(stages - 1):
        best = [min((max(best[j], sums[k] - sums[j]) for j in range(k)), default=0.0) for k in range(len(sums))]
    return best[-1]


def problems(results_dir: Path) -> Iterator[tuple[str, int, list[list[float]]]]:
    """(what, stages, cost vectors)."""
    generator = random.Random(0)
    for layers, stages in RANDOM:
        vectors = [[generator.lognormvariate(0, 1) for _ in range(layers)] for _ in range(VECTORS)]
        yield f"{layers} random layers, {VECTORS} times", stages, vectors
    for path in sorted((results_dir / "profiles").glob("*.csv")):
        profile = read_profile(path)
        key = profile.key
        name = key.model.partition("(")[0].rpartition(".")[2]
        what = f"{name}, {len(profile.layers)} layers, {key.micro_batch_size}×3×{key.image_size}×{key.image_size}"
        for stages in STAGES:
            yield what, stages, [profile.costs("time")]


def main(arguments: list[str]) -> int:
    """Print the table as Markdown: mean, and in brackets the worst, where there are several vectors."""
    results_dir = Path(arguments[0]) if arguments else PROJECT / "results" / "measured" / "balancers"
    names = routines()
    print(f"| costs | stages | {' | '.join(names)} |\n|---|---|{'---|' * len(names)}")
    for what, stages, vectors in problems(results_dir):
        cells = []
        for solve in names.values():
            ratios = [largest(v, solve(v, stages)) / smallest_possible(v, stages) for v in vectors]
            worst = f" ({max(ratios):.2f})" if len(ratios) > 1 else ""
            cells.append(f"{sum(ratios) / len(ratios):.3f}{worst}")
        print(f"| {what} | {stages} | {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
