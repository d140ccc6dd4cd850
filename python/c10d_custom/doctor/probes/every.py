"""All probes, in the order in which they run: those that leave the GPU as it was first, deaths last."""

from __future__ import annotations

from . import deaths, events, memory, round_trips, values
from .run import Probe

_EXPANDABLE = "expandable_segments:True"

PROBES: tuple[Probe, ...] = (
    Probe(
        "memory",
        (memory.exporter, memory.importer),
        (
            "memory_shared",
            "copy_engine_gbps",
            "copy_kernel_gbps",
            "torch_memory_exported",
            "torch_memory_exported_again",
        ),
    ),
    Probe(
        "events",
        (events.recorder, events.waiter),
        (
            "events_order",
            "events_recorded_again",
            "host_us_record",
            "host_us_wait",
            "host_us_done",
            "host_us_copy",
            "host_us_kernel",
        ),
    ),
    Probe(
        "stream memory operations",
        (values.writer, values.waiter),
        (
            "values_order",
            "values_released",
            "host_us_write_value",
            "host_us_wait_value",
            "values_spare_others",
            "values_released_by_host",
        ),
        seconds=25,
    ),
    Probe(
        "round trips",
        (round_trips.first, round_trips.second),
        ("round_trip_us_host", "round_trip_us_events", "round_trip_us_values"),
    ),
    Probe("many streams", (values.releaser, values.many_waiters), ("values_streams",)),
    Probe(
        "expandable segments",
        (memory.offer, memory.take_expandable),
        ("torch_expandable_exported",),
        environment={"PYTORCH_CUDA_ALLOC_CONF": _EXPANDABLE, "PYTORCH_ALLOC_CONF": _EXPANDABLE},
    ),
    Probe(
        "a death, and events",
        (deaths.doomed, deaths.event_waiter),
        ("death_ends_event_wait", "death_ends_event_wait_s", "death_spares_context"),
    ),
    Probe(
        "a death, and memory operations", (deaths.doomed_writer, deaths.value_waiter), ("values_released_after_death",)
    ),
)
