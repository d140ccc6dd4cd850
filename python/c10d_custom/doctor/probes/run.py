"""Runs probes, one after the other: each in processes of its own, which are killed when its time is over.

A probe asks its questions in order. Where something hangs, the answer to the question that it was at is no, or, to one
that asks for a number, none: never. Where an error ends it, the question stays open, with a remark; so do those that it
did not come to. Nothing in this process touches CUDA, so nothing that CUDA does can hold it."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from ...transport.cuda.decisions import QUESTIONS
from .gpu import Gpu
from .participant import Participant, main

METHOD = "spawn"  # of starting a process: CUDA survives no fork. What wants an environment of its own has no other
GRACE = 5.0  # seconds for a killed process to be gone


@dataclass(frozen=True)
class Probe:
    """``roles``: what each process does; ``asks``: the questions, in order; ``environment``: more of it, for them."""

    name: str
    roles: tuple[Callable[[Participant], None], ...]
    asks: tuple[str, ...]
    seconds: float = 20.0
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Found:
    """``remarks``: why answers are what they are, or are not there."""

    answers: dict[str, Any] = field(default_factory=dict)
    remarks: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0


def ask(probe: Probe, make: Callable[[], Gpu], seconds: float) -> Found:
    """What the probe finds within so long. No process is left, unless the kernel cannot end it."""
    began, limit = time.monotonic(), min(seconds, probe.seconds)
    found = Found()
    with tempfile.TemporaryDirectory(prefix="c10d_custom-probe-") as folder:
        words = os.path.join(folder, "words")
        with open(words, "wb") as f:
            f.write(bytes(4096))
        processes, results = _start(probe, make, words)
        try:
            error = _listen(results, began + limit, found)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join(GRACE)
    found.seconds = time.monotonic() - began
    for key in [key for key, answer in found.answers.items() if answer is None]:
        del found.answers[key]
        found.remarks[key] = "never"
    stopped = next((key for key in probe.asks if key not in found.answers and key not in found.remarks), None)
    if stopped is not None:
        found.remarks[stopped] = error or f"no answer within {limit:.0f} s"
        hung = error is None or error.startswith("TimeoutError")  # of Gpu.settle, which does not wait for ever
        if hung and stopped in QUESTIONS and not QUESTIONS[stopped].unit:
            found.answers[stopped] = False
    return found


def _start(probe: Probe, make: Callable[[], Gpu], words: str) -> tuple[list[Any], list[Connection]]:
    spawn: Any = multiprocessing.get_context("spawn" if probe.environment else METHOD)
    ends = spawn.Pipe()
    processes, results = [], []
    with _environment(probe.environment):
        for role, end in zip(probe.roles, ends):
            ours, theirs = spawn.Pipe(duplex=False)
            process = spawn.Process(target=main, args=(role, make, end, theirs, words), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            results.append(ours)
    for end in ends:
        end.close()
    return processes, results


@contextmanager
def _environment(more: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in more}
    os.environ.update(more)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


def _listen(results: list[Connection], until: float, found: Found) -> str | None:
    """Takes down answers until all have ended, or one with an error, or it is ``until``: None then, else what the error
    is, or would be if answers were missing."""
    error, heard = None, list(results)
    while heard and error is None:
        ready = [end for end in wait(heard, max(0.0, until - time.monotonic())) if isinstance(end, Connection)]
        if not ready:
            return None
        for end in ready:
            said = _take(end, heard, found)
            error = error or said
    for end in list(heard):  # what the others had said by then
        while end in heard and end.poll():
            _take(end, heard, found)
    return error or (None if heard else "its processes ended without an answer")


def _take(end: Connection, heard: list[Connection], found: Found) -> str | None:
    """One thing that a process says; its error, if that is what it is."""
    try:
        kind, *rest = end.recv()
    except (EOFError, OSError):  # killed by the other one, say
        heard.remove(end)
        return None
    if kind == "answer":
        found.answers[rest[0]] = rest[1]
    elif kind == "remark":
        found.remarks[rest[0]] = rest[1]
    elif kind == "error":
        heard.remove(end)
        return str(rest[0])
    else:
        heard.remove(end)
    return None


def ask_all(probes: Iterable[Probe], make: Callable[[], Gpu], seconds: float) -> Iterator[tuple[Probe, Found]]:
    """Each probe and what it found, as it comes; for those for which no time is left, that."""
    until = time.monotonic() + seconds
    for probe in probes:
        left = until - time.monotonic()
        if left < 1.0:
            yield probe, Found(remarks=dict.fromkeys(probe.asks[:1], "not asked: no time was left"))
        else:
            yield probe, ask(probe, make, left)


def _who(p: Participant) -> None:
    p.tell("about", p.gpu.about())


def identify(make: Callable[[], Gpu], seconds: float) -> dict[str, str]:
    """The GPU's ``uuid``, ``driver`` and ``device``; RuntimeError where none can be used."""
    found = ask(Probe("identity", (_who,), ("about",), seconds), make, seconds)
    if "about" not in found.answers:
        raise RuntimeError(found.remarks["about"])
    return dict(found.answers["about"])
