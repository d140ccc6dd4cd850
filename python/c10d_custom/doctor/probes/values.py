"""Stream memory operations: a stream waits for a word in memory, which another process's stream writes."""

from __future__ import annotations

import ctypes
import threading
import time

from .participant import Participant

BUSY = 0.3
_DATA, _SIGNAL, _UNANSWERED, _OWN = 0, 256, 512, 768  # where the words lie
_AT_ONCE = 2.0  # seconds within which what is released must end
STREAMS = (4, 8, 16, 32)


def writer(p: Participant) -> None:
    """A process writes into another's memory, as groups do: who waits does so on its own."""
    stream = p.gpu.stream()
    address = p.driver.open_memory(p.hear())
    p.say()
    p.hear()
    p.gpu.spin(stream, BUSY, address + _DATA, 99)
    p.driver.write_value(stream, address + _SIGNAL, 1)
    p.say()
    p.hear()


def waiter(p: Participant) -> None:
    stream, other, address = p.gpu.stream(), p.gpu.stream(), p.gpu.allocate_zeros(4096)
    p.say(p.driver.export_memory(address))
    p.hear()
    p.say()
    p.hear()
    began = time.monotonic()
    p.driver.wait_value(stream, address + _SIGNAL, 1)
    enqueued = time.monotonic() - began
    p.tell("values_order", p.gpu.read(stream, address + _DATA) == 99 and enqueued < BUSY / 2)
    p.driver.wait_value(stream, address + _UNANSWERED, 1)
    pending = not p.gpu.settled(stream, 0.1)
    p.driver.write_value(other, address + _UNANSWERED, 1)
    p.tell("values_released", pending and p.gpu.settled(stream, _AT_ONCE))
    p.cost("host_us_write_value", lambda: p.driver.write_value(stream, address + _OWN, 3), stream)
    p.cost("host_us_wait_value", lambda: p.driver.wait_value(stream, address + _OWN, 3), stream)
    p.driver.wait_value(stream, address + _UNANSWERED, 2)
    pending = not p.gpu.settled(stream, 0.1)  # so the GPU has come to it
    p.tell("values_spare_others", pending and _others_go_on(p, other))
    p.driver.write_value(other, address + _UNANSWERED, 2)
    p.gpu.settle(stream)
    _by_host(p, stream)
    p.say()


def _others_go_on(p: Participant, other: int) -> bool:
    allocated = threading.Event()

    def allocate() -> None:
        with p.driver.activate():
            p.driver.free(p.driver.allocate(1 << 20))
        allocated.set()

    threading.Thread(target=allocate, daemon=True).start()
    p.gpu.spin(other, 0.0)
    return p.gpu.settled(other, _AT_ONCE) and allocated.wait(_AT_ONCE)


def _by_host(p: Participant, stream: int) -> None:
    pinned = p.driver.allocate_pinned(4096)  # nothing is pending
    word = ctypes.c_uint32.from_address(pinned)
    word.value = 0
    p.driver.wait_value(stream, pinned, 1)
    pending = not p.gpu.settled(stream, 0.1)
    word.value = 1
    p.tell("values_released_by_host", pending and p.gpu.settled(stream, _AT_ONCE))


# --- many streams at once


def releaser(p: Participant) -> None:
    """Ends the waits of the other process's streams, the last stream's first."""
    stream, address = p.gpu.stream(), p.driver.open_memory(p.hear())
    p.say()
    for round_, count in enumerate(STREAMS, 1):
        for i in reversed(range(count)):
            p.hear()
            p.driver.write_value(stream, address + 256 * i, round_)
            p.gpu.settle(stream)
            p.say()


def many_waiters(p: Participant) -> None:
    streams, address = [p.gpu.stream() for _ in range(max(STREAMS))], p.gpu.allocate_zeros(256 * max(STREAMS))
    p.say(p.driver.export_memory(address))
    p.hear()
    p.tell("values_streams", 0)
    for round_, count in enumerate(STREAMS, 1):
        for i in range(count):
            p.driver.wait_value(streams[i], address + 256 * i, round_)
        for i in reversed(range(count)):
            p.say()
            p.hear()
            if not p.gpu.settled(streams[i], _AT_ONCE):
                return
        p.tell("values_streams", count)
