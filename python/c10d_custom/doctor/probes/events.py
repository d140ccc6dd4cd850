"""Events that two processes share: a stream waits for what another process's stream has recorded."""

from __future__ import annotations

import time

from .participant import Participant

BUSY = 0.4  # seconds of the work that is waited for
_FIRST, _SECOND = 7, 8


def recorder(p: Participant) -> None:
    stream, event, address = p.gpu.stream(), p.driver.create_event(shared=True), p.gpu.allocate_zeros(4096)
    p.say((p.driver.export_memory(address), p.driver.export_event(event)))
    for value in (99, _FIRST, _SECOND):
        p.hear()
        p.gpu.spin(stream, BUSY, address, value)
        p.driver.record(event, stream)
        p.say()
    p.hear()


def waiter(p: Participant) -> None:
    memory, handle = p.hear()
    address, event = p.driver.open_memory(memory), p.driver.open_event(handle)
    first, second = p.gpu.stream(), p.gpu.stream()
    _let(p)
    began = time.monotonic()
    p.driver.wait(first, event)
    enqueued = time.monotonic() - began
    p.tell("events_order", p.gpu.read(first, address) == 99 and enqueued < BUSY / 2)
    _let(p)
    p.driver.wait(first, event)
    before = p.gpu.word(first, address)
    _let(p)  # recorded again, while the wait is pending
    p.driver.wait(second, event)
    after = p.gpu.word(second, address)
    p.gpu.settle(first)
    p.gpu.settle(second)
    p.tell("events_recorded_again", (before.value, after.value) == (_FIRST, _SECOND))
    _costs(p, first, event, address)
    p.say()


def _let(p: Participant) -> None:
    """The other process records."""
    p.say()
    p.hear()


def _costs(p: Participant, stream: int, theirs: int, address: int) -> None:
    own = p.driver.create_event(shared=True)
    target = p.gpu.allocate_zeros(4096)
    p.cost("host_us_record", lambda: p.driver.record(own, stream), stream)
    p.cost("host_us_wait", lambda: p.driver.wait(stream, theirs), stream)
    p.cost("host_us_done", lambda: p.driver.done(own), stream)
    p.cost("host_us_copy", lambda: p.driver.copy(stream, target, address, 4096), stream)
    p.cost("host_us_kernel", lambda: p.gpu.spin(stream, 0.0), stream)
