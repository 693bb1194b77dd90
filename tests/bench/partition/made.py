"""A made-up profile that tests share."""

from __future__ import annotations

from bench.partition.profile import LayerProfile, ProfileKey

KEY = ProfileKey(
    model="mine.build(width=3)",
    source="abc",
    granularity="block",
    num_classes=10,
    micro_batch_size=4,
    image_size=8,
    precision="bf16",
    device="cpu",
    hardware="cpu-made-up",
    torch="2.0",
)
LAYER = LayerProfile(
    layer=0,
    kind="Linear",
    parameters=7,
    state_bytes=84,
    largest_parameter_bytes=8,
    forward_s=1.0,
    backward_s=2.0,
    update_s=0.25,
    forward_flops=100,
    backward_flops=200,
    saved_bytes=11,
    saved_input_bytes=5,
    output_bytes=13,
)
