"""Every column of the CSVs, once: name, type, unit, allowed values, meaning.

``python -m bench.schema`` prints the table; ``collect`` writes exactly these columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["RUNS", "STAGES", "STEPS", "Column"]

Kind = Literal["text", "int", "float", "bool"]


@dataclass(frozen=True)
class Column:
    """A column; empty cells mean unknown or without meaning for the row."""

    name: str
    kind: Kind
    unit: str
    doc: str
    allowed: tuple[str, ...] = ()


STATUSES = ("ok", "oom", "timeout", "error", "unsupported", "parity_failed", "interrupted")

RUNS = (
    Column("run_id", "text", "", "the run; its record is records/<run_id>.json"),
    Column("cell_id", "text", "", "hash of the normalised factors and versions"),
    Column("trial", "int", "", "which repetition"),
    Column("synthetic", "bool", "", "made up, not measured"),
    Column("library", "text", "", "the library"),
    Column("model", "text", "", "the model"),
    Column("model_options", "text", "", "its options, key=value"),
    Column("granularity", "text", "", "what is one layer", ("block", "op")),
    Column("image_size", "int", "pixels", "height and width of the input"),
    Column("num_classes", "int", "", "outputs of the last layer"),
    Column("batch_size", "int", "samples", "samples per optimizer step, over all micro-batches"),
    Column("micro_batches", "int", "", "pieces the mini-batch is cut into (m)"),
    Column("stages", "int", "", "pipeline devices (p); ddp: replicas"),
    Column("virtual_stages", "int", "", "runs of layers on one device (v)"),
    Column("nodes", "int", "", "machines"),
    Column("balance", "text", "", "the rule that picked the boundaries"),
    Column("partition", "text", "", "the boundaries it picked, numbers of layers a model stage"),
    Column("schedule", "text", "", "the resolved schedule"),
    Column("checkpoint", "text", "", "which micro-batches recompute", ("never", "except_last", "always")),
    Column("precision", "text", "", "of parameters, activations, gradients", ("fp64", "fp32", "tf32", "bf16")),
    Column("data", "text", "", "where mini-batches come from"),
    Column("seed", "int", "", "of weights and data"),
    Column("lr", "float", "", "learning rate of the measured steps"),
    Column("momentum", "float", "", "momentum of the measured steps"),
    Column("device", "text", "", "device kind", ("cpu", "cuda")),
    Column("hardware", "text", "", "fingerprint of the devices"),
    Column("share_devices", "bool", "", "stages shared a GPU: says nothing of speed"),
    Column("overlap", "bool", "", "whether this library's stages can overlap on this device"),
    Column("baseline", "bool", "", "the denominator of speed-up"),
    Column("status", "text", "", "how the run ended", STATUSES),
    Column("fail_phase", "text", "", "the phase that failed"),
    Column("fail_reason", "text", "", "the root cause in one line"),
    Column("steps", "int", "", "measured steps"),
    Column("step_time_s", "float", "s", "median of the measured steps, each the slowest rank's"),
    Column(
        "step_time_low_s",
        "float",
        "s",
        "lower end of the median's interval (order statistics, ≥ 95 % where attainable)",
    ),
    Column("step_time_high_s", "float", "s", "upper end of the same interval"),
    Column("throughput", "float", "samples/s", "batch_size / step_time_s"),
    Column("throughput_low", "float", "samples/s", "batch_size / step_time_high_s"),
    Column("throughput_high", "float", "samples/s", "batch_size / step_time_low_s"),
    Column("speedup", "float", "", "throughput over the median of the baseline's trials, all else equal"),
    Column("ratio_to_one_stage", "float", "", "throughput over the library's own at stages=1 and the same m"),
    Column("efficiency", "float", "", "speedup / stages"),
    Column("peak_bytes", "int", "bytes", "allocated peak of the largest stage (CPU: live storages)"),
    Column("parity", "text", "", "whether the work was proved equal", ("checked", "unchecked", "failed", "")),
    Column("parity_gradient_error", "float", "", "worst layer's norm-relative gradient error, own precision"),
    Column("parity_gradient_tolerance", "float", "", "what was allowed"),
    Column("parity_update_error", "float", "", "worst layer's norm-relative update error, own precision"),
    Column("parity_update_tolerance", "float", "", "what was allowed"),
    Column("parity_buffer_error", "float", "", "BatchNorm statistics, reported and not judged"),
    Column("parity_double_gradient_error", "float", "", "the same in float64 over three steps"),
    Column("parity_double_update_error", "float", "", "the same in float64 over three steps"),
    Column("parity_double_run", "text", "", "the float64 parity run's record"),
    Column("parity_unchecked", "text", "", "why parity could not be checked"),
    Column("fixed_cost_s", "float", "s", "wall_s minus all optimizer steps of any phase"),
    Column("wall_s", "float", "s", "from claim to record, without waiting for the device lock"),
    Column("waited_s", "float", "s", "waiting for the device lock"),
    Column("foreign_load", "float", "cores", "mean cores that other processes kept busy while measuring"),
    Column("library_version", "text", "", "installed version of the library (torch's own: torch's)"),
    Column("torch_version", "text", "", "installed version of torch"),
    Column("host", "text", "", "host name"),
    Column("git_commit", "text", "", "commit of the harness"),
    Column("git_dirty", "bool", "", "the harness had uncommitted changes"),
    Column("started_at", "text", "", "UTC"),
)

STAGES = (
    Column("run_id", "text", "", "the run"),
    Column("stage", "int", "", "pipeline device, from 0; ddp: replica"),
    Column("rank", "int", "", "the process that drives it"),
    Column("device", "text", "", "torch's name of it"),
    Column("device_uuid", "text", "", "GPU UUID"),
    Column("pci_address", "text", "", "PCI address"),
    Column("layers", "text", "", "flat layer indices, first-last of each run"),
    Column("parameters", "int", "", "numbers"),
    Column("parameter_bytes", "int", "bytes", "their size"),
    Column("dtype", "text", "", "read back from the parameters"),
    Column("peak_allocated_bytes", "int", "bytes", "peak of a step (CPU: live storages)"),
    Column("peak_reserved_bytes", "int", "bytes", "peak that the CUDA allocator held"),
)

STEPS = (
    Column("run_id", "text", "", "the run"),
    Column("step", "int", "", "from 0, warm-ups included"),
    Column("warmup", "bool", "", "a warm-up step"),
    Column("rank", "int", "", "the process"),
    Column("time_s", "float", "s", "this rank's time"),
    Column("step_time_s", "float", "s", "the slowest rank's time"),
    Column("loss", "float", "", "mean loss over the mini-batch"),
)


def main() -> None:
    """Print all columns as Markdown."""
    for name, columns in (("runs.csv", RUNS), ("stages.csv", STAGES), ("steps.csv", STEPS)):
        print(f"## {name}\n\n| column | type | unit | meaning |\n|---|---|---|---|")
        for c in columns:
            allowed = f" ({', '.join(a or 'empty' for a in c.allowed)})" if c.allowed else ""
            print(f"| {c.name} | {c.kind} | {c.unit} | {c.doc}{allowed} |")
        print()


if __name__ == "__main__":
    main()
