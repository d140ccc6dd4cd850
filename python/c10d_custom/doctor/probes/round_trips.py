"""A ping-pong between two processes that share a GPU, a kernel on each side, in the ways that order them."""

from __future__ import annotations

import time

from .participant import Participant

_SIGNAL = 256


def first(p: Participant) -> None:
    _play(p, 0)


def second(p: Participant) -> None:
    _play(p, 1)


def _play(p: Participant, me: int) -> None:
    stream, event, address = p.gpu.stream(), p.driver.create_event(shared=True), p.gpu.allocate_zeros(4096)
    p.say((p.driver.export_memory(address), p.driver.export_event(event)))
    memory, handle = p.hear()
    theirs, their_event = p.driver.open_memory(memory), p.driver.open_event(handle)
    ways = {
        "host": lambda i: _by_host(p, me, stream, i),
        "events": lambda i: _by_events(p, me, stream, event, their_event, i),
        "values": lambda i: _by_values(p, me, stream, address, theirs, i),
    }
    for number, (way, turn) in enumerate(ways.items()):
        p.say()
        p.hear()  # both begin
        began = time.monotonic()
        for i in range(1, p.gpu.rounds + 1):
            turn(number * p.gpu.rounds + i)
        p.gpu.settle(stream)
        if me == 0:
            p.tell(f"round_trip_us_{way}", round((time.monotonic() - began) / p.gpu.rounds * 1e6, 2))


def _by_host(p: Participant, me: int, stream: int, i: int) -> None:
    if me == 1:
        p.await_word(0, i)
    p.gpu.spin(stream, 0.0)
    p.gpu.settle(stream)
    p.set(me, i)
    if me == 0:
        p.await_word(1, i)


def _by_events(p: Participant, me: int, stream: int, own: int, theirs: int, i: int) -> None:
    """A wait is for what was recorded before it, hence the hosts tell each other that they have recorded."""
    if me == 1:
        p.await_word(0, i)
        p.driver.wait(stream, theirs)
    p.gpu.spin(stream, 0.0)
    p.driver.record(own, stream)
    p.set(me, i)
    if me == 0:
        p.await_word(1, i)
        p.driver.wait(stream, theirs)


def _by_values(p: Participant, me: int, stream: int, own: int, theirs: int, i: int) -> None:
    """Each waits on its own memory, and writes into the other's."""
    if me == 1:
        p.driver.wait_value(stream, own + _SIGNAL, i)
    p.gpu.spin(stream, 0.0)
    p.driver.write_value(stream, theirs + _SIGNAL, i)
    if me == 0:
        p.driver.wait_value(stream, own + _SIGNAL, i)
