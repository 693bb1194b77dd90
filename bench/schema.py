"""Every column of the CSVs, once: name, type, unit, allowed values, meaning.

``python -m bench.schema`` prints the table; ``collect`` writes exactly these columns and checks every
row against them.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from bench.jobs import PHASES, Status
from bench.series import Verdict

__all__ = ["KEYS", "RUNS", "STAGES", "STEPS", "TABLES", "Column", "problem"]

Kind = Literal["text", "int", "float", "bool"]

# A bool is an int to isinstance, and whole seconds come out of JSON as int.
_TYPES: dict[Kind, tuple[type, ...]] = {"text": (str,), "int": (int,), "float": (float, int), "bool": (bool,)}


@dataclass(frozen=True)
class Column:
    """A column.  Where ``nullable``, an empty cell means unknown or without meaning for the row.

    ``allowed`` lists all values of a text column that has few.
    """

    name: str
    kind: Kind
    unit: str
    doc: str
    allowed: tuple[str, ...] = ()
    nullable: bool = False

    def accepts(self, value: object) -> bool:
        """Whether the value may stand in this column."""
        if value is None or value == "":
            return self.nullable
        if isinstance(value, bool) and self.kind != "bool":
            return False
        return isinstance(value, _TYPES[self.kind]) and (not self.allowed or value in self.allowed)


def problem(row: Mapping[str, object], columns: Sequence[Column]) -> str:
    """What is wrong with a row, in one line; empty where it fits its columns."""
    unknown = row.keys() - {c.name for c in columns}
    if unknown:
        return f"{min(unknown)}: there is no such column"
    for column in columns:
        if not column.accepts(row[column.name]):
            allowed = " or ".join(column.allowed) or column.kind
            return f"{column.name}: {row[column.name]!r} is not {allowed}"
    return ""


STATUSES = typing.get_args(Status)
VERDICTS = typing.get_args(Verdict)

RUNS = (
    Column("run_id", "text", "", "the run; its record is records/<run_id>.json"),
    Column("cell_id", "text", "", "hash of the normalised factors and versions"),
    Column("trial", "int", "", "which repetition"),
    Column("schema_version", "int", "", "of the record; grows where a column changes its meaning"),
    Column("synthetic", "bool", "", "made up, not measured"),
    Column("library", "text", "", "the library"),
    Column("library_options", "text", "", "its options, key=value", nullable=True),
    Column("model", "text", "", "the model"),
    Column("model_target", "text", "", "the function that builds it"),
    Column("model_options", "text", "", "its options, key=value", nullable=True),
    Column("granularity", "text", "", "what is one layer", ("block", "op")),
    Column("image_size", "int", "pixels", "height and width of the input"),
    Column("num_classes", "int", "", "outputs of the last layer"),
    Column("batch_size", "int", "samples", "samples per optimizer step, over all micro-batches"),
    Column("micro_batches", "int", "", "pieces the mini-batch is cut into (m)"),
    Column("stages", "int", "", "pipeline devices (p); replicas for plain data parallelism"),
    Column("virtual_stages", "int", "", "runs of layers on one device (v)"),
    Column("nodes", "int", "", "machines"),
    Column("balance", "text", "", "the rule that picked the boundaries"),
    Column("balance_options", "text", "", "its options, key=value", nullable=True),
    Column("partition", "text", "", "the boundaries it picked: layers of each model stage, 8-7", nullable=True),
    Column("imbalance", "float", "", "longest model stage's profiled time over the mean", nullable=True),
    Column("predicted_step_time_s", "float", "s", "of the simulated schedule, from the profile", nullable=True),
    Column("schedule", "text", "", "the resolved schedule; none where there is no pipeline"),
    Column("checkpoint", "text", "", "which micro-batches recompute", ("never", "except_last", "always")),
    Column("precision", "text", "", "of parameters, activations, gradients", ("fp64", "fp32", "tf32", "bf16")),
    Column("optimizer", "text", "", "the optimizer"),
    Column("lr", "float", "", "learning rate of the measured steps"),
    Column("momentum", "float", "", "momentum of the measured steps"),
    Column("data", "text", "", "where mini-batches come from"),
    Column("data_path", "text", "", "the folder they are read from", nullable=True),
    Column("seed", "int", "", "of weights and data"),
    Column("device", "text", "", "device kind", ("cpu", "cuda")),
    Column("share_devices", "bool", "", "stages may share a GPU: then no speed-up is given"),
    Column("hardware", "text", "", "fingerprint of the devices"),
    Column("overlap", "bool", "", "whether this library's stages can overlap on this device"),
    Column("baseline", "bool", "", "whether it is the denominator of speed-up"),
    Column("status", "text", "", "how the run ended", STATUSES),
    Column("fail_phase", "text", "", "the phase that failed", PHASES, nullable=True),
    Column("fail_reason", "text", "", "the root cause in one line", nullable=True),
    Column("steps", "int", "", "measured steps, warm-ups left out"),
    Column("step_time_s", "float", "s", "median of the measured steps, each the slowest rank's", nullable=True),
    Column(
        "step_time_low_s",
        "float",
        "s",
        "lower end of the median's 95 % interval, widened for autocorrelation (the range below six steps)",
        nullable=True,
    ),
    Column("step_time_high_s", "float", "s", "upper end of the same interval", nullable=True),
    Column("step_time_mean_s", "float", "s", "mean of the measured steps", nullable=True),
    Column("step_time_p5_s", "float", "s", "5th percentile of the measured steps", nullable=True),
    Column("step_time_p95_s", "float", "s", "95th percentile of the measured steps", nullable=True),
    Column("autocorrelation", "float", "", "of neighbouring steps, corrected for its bias", nullable=True),
    Column("verdict", "text", "", "what the series of steps is good for", VERDICTS, nullable=True),
    Column("verdict_reason", "text", "", "why it is not stable", nullable=True),
    Column("throughput", "float", "samples/s", "batch_size / step_time_s", nullable=True),
    Column("throughput_low", "float", "samples/s", "batch_size / step_time_high_s", nullable=True),
    Column("throughput_high", "float", "samples/s", "batch_size / step_time_low_s", nullable=True),
    Column("speedup", "float", "", "throughput over the median of the baseline's runs, all else equal", nullable=True),
    Column(
        "ratio_to_one_stage",
        "float",
        "",
        "throughput over the library's own at stages=1, the same micro_batches and checkpoint",
        nullable=True,
    ),
    Column("efficiency", "float", "", "speedup / stages", nullable=True),
    Column("bubble", "float", "", "1 − busy/(devices × span) of the traced step", nullable=True),
    Column("ideal_bubble", "float", "", "of its schedule with even stages and free boundaries", nullable=True),
    Column("overlapped", "bool", "", "whether two devices were ever busy at once in it", nullable=True),
    Column("traced_step_time_s", "float", "s", "the traced step, which the next six add up to", nullable=True),
    Column("ideal_s", "float", "s", "all forwards, backwards, updates, evenly over the devices", nullable=True),
    Column("bubble_s", "float", "s", "what the schedule adds for even stages", nullable=True),
    Column("imbalance_s", "float", "s", "what the measured stages add to that", nullable=True),
    Column("recompute_s", "float", "s", "what recomputation adds to that", nullable=True),
    Column("communication_s", "float", "s", "transfers, waiting and the library's own work between", nullable=True),
    Column("unexplained_s", "float", "s", "before the first forward and after the last update", nullable=True),
    Column("stamp_cost_s", "float", "s", "what a stamp of the trace cost the host", nullable=True),
    Column("flops_per_step", "int", "FLOP", "the model's forward and backward, by torch's flop_counter", nullable=True),
    Column("recompute_flops_per_step", "int", "FLOP", "of recomputed forwards, on top of that", nullable=True),
    Column("flop_rate", "float", "FLOP/s", "flops_per_step / step_time_s", nullable=True),
    Column("utilisation", "float", "", "of that over the devices' peak, where it is known", nullable=True),
    Column("peak_bytes", "int", "bytes", "allocated peak of the largest stage (CPU: live storages)", nullable=True),
    Column(
        "parity", "text", "", "whether the work was proved equal", ("checked", "unchecked", "failed"), nullable=True
    ),
    Column("parity_gradient_error", "float", "", "(a) worst layer's relative error of the gradient", nullable=True),
    Column("parity_gradient_tolerance", "float", "", "what was allowed", nullable=True),
    Column("parity_update_error", "float", "", "(a) worst layer's relative error of the update", nullable=True),
    Column("parity_update_tolerance", "float", "", "what was allowed", nullable=True),
    Column("parity_buffer_error", "float", "", "(a) BatchNorm statistics: reported, never judged", nullable=True),
    Column("parity_double_gradient_error", "float", "", "(b) the gradient's in float64, three steps", nullable=True),
    Column("parity_double_gradient_tolerance", "float", "", "what was allowed", nullable=True),
    Column("parity_double_update_error", "float", "", "(b) the update's in float64, three steps", nullable=True),
    Column("parity_double_update_tolerance", "float", "", "what was allowed", nullable=True),
    Column("parity_double_run", "text", "", "the record that (b) stands in", nullable=True),
    Column("parity_unchecked", "text", "", "why parity could not be checked", nullable=True),
    Column("fixed_cost_s", "float", "s", "wall_s minus all optimizer steps of any phase", nullable=True),
    Column("wall_s", "float", "s", "from claim to record, without waiting for the device lock", nullable=True),
    Column("waited_s", "float", "s", "waiting for the device lock"),
    Column("foreign_load", "float", "cores", "mean cores that others kept busy while measuring", nullable=True),
    Column("library_version", "text", "", "installed version (of torch, for libraries in it)", nullable=True),
    Column("torch_version", "text", "", "installed version of torch", nullable=True),
    Column("host", "text", "", "host name", nullable=True),
    Column("git_commit", "text", "", "commit of the harness", nullable=True),
    Column("git_dirty", "bool", "", "whether the harness had uncommitted changes", nullable=True),
    Column("started_at", "text", "", "UTC"),
)

STAGES = (
    Column("run_id", "text", "", "the run"),
    Column("stage", "int", "", "pipeline device, from 0; the replica for plain data parallelism"),
    Column("rank", "int", "", "the process that drives it"),
    Column("device", "text", "", "torch's name of it"),
    Column("device_uuid", "text", "", "GPU UUID", nullable=True),
    Column("pci_address", "text", "", "PCI address", nullable=True),
    Column("layers", "text", "", "flat layer indices, first-last of each run", nullable=True),
    Column("parameters", "int", "", "how many numbers"),
    Column("parameter_bytes", "int", "bytes", "their size"),
    Column("dtype", "text", "", "read back from the parameters", nullable=True),
    Column("busy_s", "float", "s", "forwards, recomputations and backwards of the traced step", nullable=True),
    Column("idle_s", "float", "s", "the rest of its span", nullable=True),
    Column("waiting_s", "float", "s", "of that between the device's first and last work", nullable=True),
    Column("peak_allocated_bytes", "int", "bytes", "peak of a step (CPU: live storages)", nullable=True),
    Column("peak_reserved_bytes", "int", "bytes", "peak that the CUDA allocator held", nullable=True),
    Column("peak_parameters_bytes", "int", "bytes", "of the peak: parameters and buffers", nullable=True),
    Column("peak_gradients_bytes", "int", "bytes", "of the peak: gradients of parameters", nullable=True),
    Column("peak_optimizer_state_bytes", "int", "bytes", "of the peak: the optimizer's", nullable=True),
    Column("peak_placed_bytes", "int", "bytes", "of the peak: the placed mini-batch", nullable=True),
    Column("peak_activations_bytes", "int", "bytes", "of the peak: all else", nullable=True),
    Column("predicted_peak_bytes", "int", "bytes", "counted from the profile and the schedule alone", nullable=True),
    Column("clock_low_mhz", "int", "MHz", "lowest SM clock seen while it was measured", nullable=True),
    Column("clock_high_mhz", "int", "MHz", "highest SM clock seen while it was measured", nullable=True),
    Column("throttle_reasons", "text", "", "why NVML said that it was slowed down meanwhile", nullable=True),
    Column("allocator_retries", "int", "", "times the CUDA allocator had to free its cache", nullable=True),
)

STEPS = (
    Column("run_id", "text", "", "the run"),
    Column("step", "int", "", "from 0, warm-ups included"),
    Column("warmup", "bool", "", "whether it is a warm-up step"),
    Column("rank", "int", "", "the process"),
    Column("time_s", "float", "s", "this rank's time"),
    Column("step_time_s", "float", "s", "the slowest rank's time"),
    Column("loss", "float", "", "mean loss over the mini-batch", nullable=True),
)

TABLES = {"runs": RUNS, "stages": STAGES, "steps": STEPS}
# The columns that together name a row.
KEYS = {"runs": ("run_id",), "stages": ("run_id", "stage"), "steps": ("run_id", "step", "rank")}


def main() -> None:
    """Print all columns as Markdown."""
    for name, columns in TABLES.items():
        print(f"## {name}.csv\n\n| column | type | unit | may be empty | meaning |\n|---|---|---|---|---|")
        for c in columns:
            allowed = f" ({', '.join(c.allowed)})" if c.allowed else ""
            print(f"| {c.name} | {c.kind} | {c.unit} | {'yes' if c.nullable else ''} | {c.doc}{allowed} |")
        print()


if __name__ == "__main__":
    main()
