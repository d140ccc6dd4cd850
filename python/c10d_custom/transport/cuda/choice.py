"""Which order (order.py) a group takes: what was asked for, and what probes have found on this machine.

A probe's answers are yes, no or a number each, under its question's key; what was not answered has no key.
"""

from __future__ import annotations

from collections.abc import Mapping

# What must have been seen before streams may wait for another process so: (key, the answer that it takes, or the
# least). By `events` nothing on this side ends a wait, so the other's death must.
NEEDS: dict[str, tuple[tuple[str, bool | float], ...]] = {
    "host": (),
    "values": (
        ("values_order", True),
        ("values_released", True),
        ("values_released_after_death", True),
        ("values_spare_others", True),
        ("values_streams", 16),
    ),
    "events": (
        ("events_order", True),
        ("events_recorded_again", True),
        ("death_ends_event_wait", True),
        ("death_spares_context", True),
    ),
}
# Those whose own trial, by the ranks of the group, stands for the probes where they are asked for by name.
TRIED = ("host", "values")


def choose_order(wanted: str, probed: Mapping[str, bool | float] | None) -> tuple[str, str]:
    """(name, reason). ``wanted``: a name, or "auto"; ``probed``: the probes' answers, None where they have not run.
    What may leave streams waiting for ever is never chosen, whoever wants it; "auto" is `host` unless another order is
    safe here and was measured to be faster."""
    answers = {} if probed is None else probed
    if wanted != "auto":
        missing = unmet(wanted, answers)
        if not missing or wanted in TRIED:
            return wanted, "C10D_CUSTOM_CUDA_ORDER says so"
        said = "no probe has run on this machine" if probed is None else f"not answered as it must be: {missing[0]}"
        return "host", f"{wanted} may leave streams waiting for ever here ({said})"
    if probed is None:
        return "host", "no probe has run on this machine"
    times = {name: answers.get(f"round_trip_us_{name}") for name in NEEDS if not unmet(name, answers)}
    measured = {name: float(t) for name, t in times.items() if t is not None}
    best = min(measured, key=lambda name: measured[name]) if "host" in measured else "host"
    return best, "of what is safe here the fastest" if best != "host" else "nothing safe here is known to be faster"


def unmet(name: str, answers: Mapping[str, bool | float]) -> list[str]:
    """The keys of what ``name`` needs and the answers do not give."""

    def met(key: str, least: bool | float) -> bool:
        answer = answers.get(key)
        return answer is True if least is True else answer is not None and answer >= least

    return [key for key, least in NEEDS[name] if not met(key, least)]
