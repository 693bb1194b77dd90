"""DeepSpeed: ``PipelineModule`` with one ``nn.Sequential`` a stage, so that any partition can be asked for.

``python -m adapters.deepspeed`` compiles the extension that DeepSpeed wants on CPU, once.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from adapters.protocol import Capabilities, ReadBack, ScheduleRule, Task

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["build", "capabilities", "native_partition"]

capabilities = Capabilities(
    distribution="deepspeed",
    extra="deepspeed",
    modules=("deepspeed", "deepspeed.pipe"),
    ranks="per_stage",
    stages_are="devices",
    schedules=(ScheduleRule(name="1f1b"),),
    checkpoints=("never", "always"),
    several_nodes=True,
    native_balances=dict.fromkeys(("uniform", "parameters", "regex"), ("cpu", "cuda")),
    reasons={
        "checkpoint=except_last": "activation_checkpoint_interval recomputes every micro-batch or none",
    },
    environment={"DS_ACCELERATOR": "{device}"},
    notes=(
        "each step broadcasts the mean loss from the last stage to all ranks (part of train_batch)",
        "recomputation advances BatchNorm statistics a second time",
        "copies each micro-batch when it is loaded, each input of a stage before its forward, and each received "
        "activation",
    ),
)


class DeepSpeedPipeline:
    """See ``adapters.protocol.Pipeline``."""

    def __init__(self, task: Task) -> None:
        import deepspeed  # type: ignore[import-untyped]
        from deepspeed.pipe import PipelineModule  # type: ignore[import-untyped]
        from torch import nn

        self.task = task
        self.device = task.devices[task.rank]
        deepspeed.init_distributed(dist_init_required=False)
        bounds = [sum(task.partition[:i]) for i in range(task.stages + 1)]
        flat = list(task.model)
        stages = [nn.Sequential(*flat[a:b]) for a, b in itertools.pairwise(bounds)]
        module = PipelineModule(
            layers=stages,
            num_stages=task.stages,
            loss_fn=task.loss,
            partition_method="uniform",
            activation_checkpoint_interval=1 if task.checkpoint == "always" else 0,
            checkpointable_layers=["Sequential"],
        )
        self.stage = stages[task.rank]
        self._layers = dict(zip(range(bounds[task.rank], bounds[task.rank + 1]), self.stage, strict=True))
        parameters = list(module.parameters())
        # The engine needs an optimizer on every rank: a stage without parameters gets a dummy one.
        self._dummy = [] if parameters else [nn.Parameter(next(task.model.parameters()).new_zeros(1))]
        self.optim = task.make_optimizer(parameters or [p.to(self.device) for p in self._dummy])
        config = {
            "train_micro_batch_size_per_gpu": task.batch_size // task.micro_batches,
            "gradient_accumulation_steps": task.micro_batches,
            "gradient_clipping": 0.0,  # the default is 1.0
            "steps_per_print": None,
            "zero_allow_untested_optimizer": True,
            "timers": {"throughput": {"enabled": False}},
            "pipeline": {"use_reentrant": False},
        }
        self.engine, _, _, _ = deepspeed.initialize(
            model=module, optimizer=self.optim, config=config, dist_init_required=False
        )
        # There is one pipeline and so nothing to reduce; the reduction also refuses float64.
        self.engine.pipeline_enable_backward_allreduce = False

    def place(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        # The engine takes the input on the first stage and the target on the last, and nothing else.
        m = self.task.micro_batches
        first, last = self.task.rank == 0, self.task.rank == self.task.stages - 1
        if not first and not last:
            return []
        xs = x.to(self.device).chunk(m) if first else [None] * m
        ys = y.to(self.device).chunk(m) if last else [None] * m
        return list(zip(xs, ys, strict=True))

    def step(self, batch: Any) -> torch.Tensor | None:
        loss: torch.Tensor = self.engine.train_batch(iter(batch) if batch else None)
        # train_batch cleared the gradients after its own optimizer step.
        return loss.detach() if self.task.rank == self.task.stages - 1 else None

    def stages(self) -> Mapping[int, nn.Module]:
        return {self.task.rank: self.stage}

    def layers(self) -> Mapping[int, nn.Module]:
        return self._layers

    def optimizer(self) -> torch.optim.Optimizer | None:
        return None if self._dummy else self.engine.optimizer

    def read_back(self) -> ReadBack:
        parts = self.engine.module.parts
        mine = self.engine.module.forward_funcs
        layers = sum(len(f) for f in mine) if parts == list(range(self.task.stages + 1)) else -1
        return ReadBack(
            partition={self.engine.stage_id: layers},
            micro_batches=self.engine.micro_batches,
            schedule={"TrainSchedule": "1f1b"}[type(self.engine._train_schedule()).__name__],
            checkpoint="always" if self.engine.module.activation_checkpoint_interval else "never",
        )

    def close(self) -> None:
        self.engine.destroy()


def build(task: Task) -> DeepSpeedPipeline:
    """An engine whose stage on this rank holds exactly the asked layers."""
    return DeepSpeedPipeline(task)


def native_partition(rule: str, options: Mapping[str, Any], task: Task) -> tuple[int, ...]:
    """What ``partition_method`` cuts of the flat list; ``regex`` is for the names of layers' classes."""
    import deepspeed
    from deepspeed.pipe import PipelineModule

    deepspeed.init_distributed(dist_init_required=False)
    method = f"type:{options['regex']}" if rule == "regex" else rule
    module = PipelineModule(layers=list(task.model), num_stages=task.stages, partition_method=method)
    return tuple(b - a for a, b in itertools.pairwise(module.parts))


def _compile_extension() -> None:
    import os
    import tempfile

    import torch.distributed as dist

    os.environ.update({"DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1"})
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        import deepspeed

        deepspeed.init_distributed(dist_init_required=False)
        dist.destroy_process_group()


if __name__ == "__main__":
    _compile_extension()
