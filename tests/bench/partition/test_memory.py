"""The count of a stage's peak, on layers whose peak is found by going through a step by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.partition.memory import stage_memory
from bench.partition.profile import LayerProfile
from bench.partition.simulate import Schedule
from tests.bench.partition.made import LAYER

# Two layers of 10 and 20 numbers of 4 bytes; the second saves its input, which the first has made.
LAYERS = [
    dataclasses.replace(
        LAYER,
        layer=i,
        parameters=n,
        state_bytes=3 * 4 * n,
        largest_parameter_bytes=4 * n,
        saved_bytes=saved,
        saved_input_bytes=0,
        output_bytes=out,
    )
    for i, (n, saved, out) in enumerate(((10, 1000, 100), (20, 500, 50)))
]


def terms(layers: list[LayerProfile] = LAYERS, stage: int = 1, stages: int = 2, entering: int = 70, **schedule: Any):  # type: ignore[no-untyped-def]
    asked: dict[str, Any] = {"name": "1f1b", "micro_batches": 4} | schedule
    return stage_memory(layers, entering, Schedule(**asked), stage, stages, 4)


def test_the_last_stage_of_1f1b_holds_one_micro_batch_and_all_gradients() -> None:
    found = terms()
    assert (found.parameters, found.optimizer_state, found.placed) == (120, 120, 0)
    assert (found.saved, found.in_flight) == (0, 1)
    # Fullest before the last layer's backward: what entered, both layers' activations, the gradients of
    # that layer's output and input, all gradients and the new one of its parameter.
    assert (found.working, found.transient) == (70 + 1500, 50 + 100)
    assert found.gradients == 120 + 80
    assert found.total == 120 + 120 + 1570 + 150 + 200


def test_the_first_stage_holds_the_mini_batch_and_as_many_micro_batches_as_are_in_flight() -> None:
    for name, flying in (("1f1b", 2), ("gpipe", 4)):
        found = terms(stage=0, name=name)
        assert found.placed == 4 * 70
        assert found.in_flight == flying
        assert found.saved == (flying - 1) * 1500


def test_recomputing_ahead_keeps_the_activations_of_two_micro_batches_but_on_the_last_stage() -> None:
    # FairScale's first stage held 1.4 times what was counted: it had recomputed the next micro-batch already.
    def saved(stage: int, ahead: bool, checkpoint: str = "always") -> int:
        schedule = Schedule(name="gpipe", micro_batches=4, checkpoint=checkpoint)  # type: ignore[arg-type]
        return stage_memory(LAYERS, 70, schedule, stage, 2, 4, recomputes_ahead=ahead).saved

    assert saved(0, False) == 0
    assert saved(0, True) == saved(0, True, "except_last") == 1500
    assert saved(1, True) == saved(1, False) < 1500
    assert saved(0, True, "never") == saved(0, False, "never") == 3 * 1500


def test_of_a_gpipe_stage_with_few_activations_a_later_backward_is_the_fullest() -> None:
    small = [dataclasses.replace(layer, saved_bytes=1, output_bytes=1) for layer in LAYERS]
    found = terms(small, stage=0, name="gpipe")
    assert found.in_flight == 3
    # Before the first layer's backward: its input's gradient outweighs the larger one of the other layer.
    assert found.gradients == 120 + 40


def test_recomputation_keeps_inputs_instead() -> None:
    # A later backward is the fullest: one input less, but all gradients.
    for checkpoint in ("always", "except_last"):
        found = terms(name="gpipe", checkpoint=checkpoint)
        assert (found.in_flight, found.saved) == (3, 2 * 70)
    # In 1f1b the last micro-batch keeps its activations while another is recomputed, where two are in flight.
    both = terms(stage=0, name="1f1b", checkpoint="except_last")
    assert both.saved == 0 + 1500


layers = st.lists(
    st.builds(
        lambda n, saved, out: dataclasses.replace(
            LAYER, parameters=n, state_bytes=12 * n, largest_parameter_bytes=4 * n, saved_bytes=saved, output_bytes=out
        ),
        st.integers(0, 100),
        st.integers(0, 100),
        st.integers(0, 100),
    ),
    min_size=1,
    max_size=6,
)


@given(layers, st.integers(1, 8), st.sampled_from(["gpipe", "1f1b"]), st.integers(0, 3))
def test_more_micro_batches_never_need_less_and_parameters_and_momentum_are_always_there(
    made: list[LayerProfile], m: int, name: str, stage: int
) -> None:
    def total(count: int, checkpoint: str) -> int:
        return terms(made, stage=stage, stages=4, name=name, micro_batches=count, checkpoint=checkpoint).total

    assert total(m, "never") <= total(m + 1, "never")
    standing = sum(layer.state_bytes for layer in made) * 2 // 3
    assert all(total(m, checkpoint) >= standing for checkpoint in ("always", "except_last", "never"))


@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
def test_one_micro_batch_has_no_later_backward(checkpoint: str) -> None:
    found = terms(name="gpipe", micro_batches=1, checkpoint=checkpoint)
    assert found.in_flight == 1
    assert found.gradients <= 120
