"""What a stage holds at its peak, counted from its layers and the schedule alone, with its terms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.partition.profile import LayerProfile
from bench.partition.simulate import Schedule

__all__ = ["MemoryTerms", "stage_memory"]


@dataclass(frozen=True, kw_only=True)
class MemoryTerms:
    """Bytes of one stage at its peak.

    ``parameters``, ``optimizer_state``; ``gradients``: those of parameters that are there at that
    moment; ``placed``: the mini-batch on the first stage.  ``saved``: what the other micro-batches in
    flight keep (activations, or inputs where they will be recomputed), ``in_flight`` of them counting
    the one at work.  ``working``: what that one keeps, ``transient`` the gradients of activations
    beside it.
    """

    parameters: int
    gradients: int
    optimizer_state: int
    placed: int
    saved: int
    in_flight: int
    working: int
    transient: int

    @property
    def total(self) -> int:
        """All of it."""
        standing = self.parameters + self.gradients + self.optimizer_state + self.placed
        return standing + self.saved + self.working + self.transient


def stage_memory(
    layers: Sequence[LayerProfile],
    entering_bytes: int,
    schedule: Schedule,
    stage: int,
    stages: int,
    item_bytes: int,
    *,
    recomputes_ahead: bool = False,
) -> MemoryTerms:
    """The peak of ``stage`` of ``stages`` with these layers; ``entering_bytes``: one micro-batch's input of it.

    A stage is fullest in a backward: as many micro-batches as ever are in flight, and one of them gives
    up its activations layer by layer, from the last on, while gradients of parameters come to be (in a
    step's first backward) or are there and are added to (in any later one).  Both are gone through, and
    the fuller counts.  A received input is held until its backward; the first stage's is part of the
    placed mini-batch.  ``recomputes_ahead``: every stage but the last recomputes the next micro-batch
    before this one's backward, so that both have all their activations.
    """
    m, flying = schedule.micro_batches, schedule.in_flight(stage, stages)
    parameters = sum(layer.parameters for layer in layers) * item_bytes
    received = entering_bytes if stage else 0
    whole = received + sum(layer.saved_bytes for layer in layers)
    recomputes = schedule.checkpoint == "always" or (schedule.checkpoint == "except_last" and m > 1)
    kept = received if recomputes else whole
    # Later backwards have as many others beside them only where forwards went on in between.
    later = flying - 1 if m > flying else flying - 2
    moments = [(flying - 1, False)] + ([(later, True)] if m > 1 and later >= 0 else [])
    found = []
    for others, added_to in moments:
        saved = others * kept
        if schedule.checkpoint == "except_last" and others and (schedule.name == "1f1b" or not schedule.last_first):
            saved += whole - kept  # the last micro-batch is still among the others, with all its activations
        elif recomputes_ahead and recomputes and others and stage < stages - 1:
            saved += whole - kept
        working, transient, gradients = _fullest(layers, received, entering_bytes, item_bytes, added_to)
        found.append(
            MemoryTerms(
                parameters=parameters,
                gradients=gradients,
                optimizer_state=sum(layer.state_bytes for layer in layers) - 2 * parameters,
                placed=0 if stage else m * entering_bytes,
                saved=saved,
                in_flight=others + 1,
                working=working,
                transient=transient,
            )
        )
    return max(found, key=lambda terms: terms.total)


def _fullest(
    layers: Sequence[LayerProfile], received: int, entering_bytes: int, item_bytes: int, added_to: bool
) -> tuple[int, int, int]:
    """(kept, gradients of activations, gradients of parameters) at the fullest moment of one backward."""
    best = (received, 0, 0)
    every = sum(layer.parameters for layer in layers) * item_bytes
    kept = received + sum(layer.saved_bytes for layer in layers)
    made = 0
    for i in range(len(layers) - 1, -1, -1):
        made += layers[i].parameters * item_bytes
        entering = layers[i - 1].output_bytes if i else entering_bytes
        # What is added to a gradient stands beside it until then, one parameter after the other.
        gradients = every + layers[i].largest_parameter_bytes if added_to else made
        best = max(best, (kept, layers[i].output_bytes + entering, gradients), key=sum)
        kept -= layers[i].saved_bytes
    return best
