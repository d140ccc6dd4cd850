"""What was asked of a machine's GPU (by doctor/probes), and what the answers decide: as data, in tables.

An answer is True, False or a number, under its question's key; a question that has no answer has no key. Every
yes/no question is put so that yes is what one would like, and a row's needs are met by answers alone: what was not
asked, and what was asked in vain, is relied upon by nobody. Without any answers the last row of each subject holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Answers = Mapping[str, bool | float]


@dataclass(frozen=True)
class Question:
    """``unit``: of a number; "" where the answer is yes or no."""

    text: str
    unit: str = ""


QUESTIONS: dict[str, Question] = {
    "memory_shared": Question("two processes see what the other writes in GPU memory that one has opened by CUDA IPC"),
    "events_order": Question(
        "a stream that waits for another process's event comes after that process's work, and no host waits"
    ),
    "events_recorded_again": Question(
        "an event may be recorded again while waits for it are pending: each is for what was recorded before it"
    ),
    "death_ends_event_wait": Question("a wait for an event of a process that is killed ends"),
    "death_ends_event_wait_s": Question("from the death to the end of that wait", "s"),
    "death_spares_context": Question("after that, the GPU work of the process that waited goes on without an error"),
    "values_order": Question(
        "a stream that waits by a stream memory operation for a word of its own memory, which another process's stream "
        "writes, comes after that process's work, and no host waits"
    ),
    "values_released": Question("a write by another stream of the same process ends such a wait"),
    "values_released_after_death": Question("also where the process that would have written has been killed"),
    "values_spare_others": Question("while such a wait is pending, cudaMalloc and launches on other streams go on"),
    "values_released_by_host": Question("a wait for a word in pinned host memory ends when the host writes the word"),
    "values_streams": Question("so many streams of one process may have such waits pending at once", "streams"),
    "round_trip_us_host": Question("a round trip between two processes whose hosts wait for their streams", "us"),
    "round_trip_us_events": Question("the same, ordered by events", "us"),
    "round_trip_us_values": Question("the same, ordered by stream memory operations", "us"),
    "copy_engine_gbps": Question("a copy from another process's memory by cudaMemcpyAsync, bytes read", "GB/s"),
    "copy_kernel_gbps": Question("the same by a kernel", "GB/s"),
    "torch_memory_exported": Question("memory of torch's allocator can be opened by another process"),
    "torch_memory_exported_again": Question(
        "when such memory is freed while another process has it open, what comes in its place has a number that none "
        "had before, and who has closed the old one opens the new one"
    ),
    "torch_expandable_exported": Question("also where torch's segments are expandable"),
    "host_us_record": Question("the host's time for recording an event", "us"),
    "host_us_wait": Question("for letting a stream wait for another process's event", "us"),
    "host_us_done": Question("for asking whether an event is past", "us"),
    "host_us_write_value": Question("for a stream memory operation that writes", "us"),
    "host_us_wait_value": Question("for one that waits", "us"),
    "host_us_copy": Question("for enqueuing a small copy", "us"),
    "host_us_kernel": Question("for launching a kernel", "us"),
}

# What an answer is compared with: a constant, or the answer to another question.
Need = tuple[str, str, bool | float | str]


@dataclass(frozen=True)
class Row:
    """If all ``needs`` are met, ``choice`` is safe; if ``gain`` is, too, ``subject`` is ``choice``."""

    subject: str
    choice: str
    because: str
    needs: tuple[Need, ...] = ()
    gain: tuple[Need, ...] = ()


# Of each subject, the first row that holds.
TABLE: tuple[Row, ...] = (
    Row(
        "mode",
        "staged",
        "without memory that processes share there is only the way through host memory",
        needs=(("memory_shared", "is", False),),
    ),
    Row("mode", "trial", "the GPUs that the ranks have decide, and a trial by all of them"),
    Row(
        "order",
        "values",
        "faster than waiting on the host, and a host ends its own stream's wait, whatever another process does",
        needs=(
            ("values_order", "is", True),
            ("values_released", "is", True),
            ("values_released_after_death", "is", True),
            ("values_spare_others", "is", True),
            ("values_streams", ">=", 16),
        ),
        gain=(("round_trip_us_values", "<", "round_trip_us_host"),),
    ),
    Row(
        "order",
        "events",
        "faster than waiting on the host, and seen here: a wait ends with the process that it is for",
        needs=(
            ("events_order", "is", True),
            ("events_recorded_again", "is", True),
            ("death_ends_event_wait", "is", True),
            ("death_spares_context", "is", True),
        ),
        gain=(("round_trip_us_events", "<", "round_trip_us_host"),),
    ),
    Row("order", "host", "rests on no answer: a wait on the host has a deadline, whatever another process does"),
    Row(
        "memory",
        "mapped",
        "users' tensors can be read and written in place, which saves copies",
        needs=(
            ("memory_shared", "is", True),
            ("torch_memory_exported", "is", True),
            ("torch_memory_exported_again", "is", True),
        ),
    ),
    Row("memory", "staging", "memory of our own can be opened wherever any can"),
)
# Orders that the ranks of a group try themselves, which stands for the probes where they are asked for by name.
TRIED = ("host", "values")


def met(need: Need, answers: Answers) -> bool:
    key, relation, other = need
    mine = answers.get(key)
    against = answers.get(other) if isinstance(other, str) else other
    if mine is None or against is None:
        return False
    if relation == "is":
        return mine is against
    return mine < against if relation == "<" else mine >= against


def decide(answers: Answers | None) -> dict[str, Row]:
    """{subject: the row that holds}; ``answers``: None where this machine was not asked."""
    chosen: dict[str, Row] = {}
    for row in TABLE:
        if row.subject not in chosen and all(met(need, answers or {}) for need in (*row.needs, *row.gain)):
            chosen[row.subject] = row
    return chosen


def choose_order(wanted: str, answers: Answers | None) -> tuple[str, str]:
    """(name, reason). ``wanted``: the name of an order, or "auto". What may leave streams waiting for ever is never
    chosen, whoever wants it."""
    if wanted == "auto":
        row = decide(answers)["order"]
        return row.choice, "no probe has run on this machine" if answers is None else row.because
    row = next(row for row in TABLE if (row.subject, row.choice) == ("order", wanted))
    missing = [need[0] for need in row.needs if not met(need, answers or {})]
    if not missing or wanted in TRIED:
        return wanted, "C10D_CUSTOM_CUDA_ORDER says so"
    said = "no probe has run on this machine" if answers is None else f"not answered as it must be: {missing[0]}"
    return "host", f"{wanted} may leave streams waiting for ever here ({said})"
