"""What a process's death does to those whose streams wait for its work."""

from __future__ import annotations

import os
import signal
import time

from .participant import Participant

PATIENCE = 4.0  # seconds; the work that is waited for would take twice as long
_NEVER = 1


def doomed(p: Participant) -> None:
    """Records an event after work that it does not live to see the end of."""
    stream, event = p.gpu.stream(), p.driver.create_event(shared=True)
    p.gpu.spin(stream, 2 * PATIENCE)
    p.driver.record(event, stream)
    p.say((p.driver.export_event(event), os.getpid()))
    time.sleep(3600)


def event_waiter(p: Participant) -> None:
    stream, other, own = p.gpu.stream(), p.gpu.stream(), p.gpu.allocate_zeros(4096)
    handle, pid = p.hear()
    p.driver.wait(stream, p.driver.open_event(handle))
    os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    try:
        ended = p.gpu.settled(stream, PATIENCE)
    except Exception:  # ended, by an error: what that means is the next question but one
        ended = True
    p.tell("death_ends_event_wait", ended)
    p.tell("death_ends_event_wait_s", round(time.monotonic() - began, 4) if ended else None)
    try:
        p.gpu.spin(other, 0.0, own, 5)
        fine = p.gpu.read(other, own) == 5
    except Exception:
        fine = False
    p.tell("death_spares_context", fine)


def doomed_writer(p: Participant) -> None:
    """Has the other's memory open, and never writes there."""
    stream, address = p.gpu.stream(), p.driver.open_memory(p.hear())
    p.gpu.read(stream, address)
    p.say(os.getpid())
    time.sleep(3600)


def value_waiter(p: Participant) -> None:
    stream, other, address = p.gpu.stream(), p.gpu.stream(), p.gpu.allocate_zeros(4096)
    p.say(p.driver.export_memory(address))
    pid = p.hear()
    p.driver.wait_value(stream, address, _NEVER)
    os.kill(pid, signal.SIGKILL)
    time.sleep(0.5)  # until it is gone
    p.driver.write_value(other, address, _NEVER)
    p.tell("values_released_after_death", p.gpu.settled(stream, PATIENCE))
