"""When and where the files of this process are written: on the first failure of each group, and on a signal; ours only
if C10D_CUSTOM_TRACE_DIR names a folder, torch's only if TORCH_FR_DUMP_TEMP_FILE is set.

A source is a transport: it has name, rank, size, members, trace() and peers(). Files are readable by their user only,
and no two of ours have the same name: rank, host and pid, and a number counted up until the name is free.

And from where in the user's program calls are made: stacks without torch.distributed's frames and ours."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import time
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable
from types import FrameType
from typing import TYPE_CHECKING

from torch import distributed

from .. import config as settings
from ..errors import UsageError
from ..threads import socket, threading
from ..trace import file, flight_recorder
from ..trace.file import Dump, GroupTrace
from ..transport.call_log import Frame
from .issuing import forget, stacks, traced, written

if TYPE_CHECKING:
    from ..config import Config
    from ..transport import Transport
    from ..transport.call_log import Record


def follow(source: Transport, config: Config) -> None:
    """From now on files have this source, and are written when it fails or the signal comes."""
    key = id(source)
    traced[key] = weakref.ref(source, lambda _: forget(key))  # not the source: that would keep it
    if config.trace_frames:
        stacks[key] = CallStacks(config.trace)
    if config.trace_dir or (settings.flight_recorder_file() and settings.flight_recorder_on_failure()):
        of = weakref.ref(source)
        source.on_failure(lambda error: _failed(of(), key, error, config))


def _failed(source: Transport | None, key: int, error: BaseException, config: Config) -> None:
    if source is None or key in written:
        return
    written.add(key)
    known = _groups()
    groups = list(known.values())
    _tell_frames([known[key]] if key in known else [], sys._getframe(1))
    if config.trace_dir:
        try:
            path = _write(config.trace_dir, f"{type(error).__name__}: {error}", groups)
        except OSError as problem:
            error.add_note(f"C10D_CUSTOM_TRACE_DIR: the trace could not be written: {problem}")
        else:
            error.add_note(
                f"This rank's last calls: {path} (all ranks together: python -m c10d_custom trace {config.trace_dir}/*)"
            )
    beginning = settings.flight_recorder_file()
    if beginning and settings.flight_recorder_on_failure():
        try:
            path = flight_recorder.write(beginning, _rank(groups), groups, config.trace)
        except Exception as problem:
            error.add_note(f"TORCH_FR_DUMP_TEMP_FILE: the file could not be written: {problem}")
        else:
            error.add_note(f"This rank's last calls, for torchfrtrace: {path}")


def _groups() -> dict[int, GroupTrace]:
    """The calls of all groups of this process, by key."""
    found = {}
    for key, ref in list(traced.items()):
        if (s := ref()) is not None:
            group = GroupTrace(s.name or "", s.rank, s.size, list(s.members), s.peers(), s.trace())
            if (noted := stacks.get(key)) is not None:
                noted.tell(group.calls)
            found[key] = group
    return found


def _tell_frames(groups: list[GroupTrace], frame: FrameType | None) -> None:
    """``frame`` is amid the last call of these groups that has begun and has not ended well: it gets frames, if it has
    none."""

    def order(call: Record) -> tuple[bool, float]:
        return call.began is not None, call.issued

    calls = [c for g in groups for c in g.calls if c.state != "done"]
    if calls and not (last := max(calls, key=order)).frames:
        last.frames = stack(frame)


def _rank(groups: list[GroupTrace]) -> int:
    return next((g.members[g.rank] for g in groups), 0)


def _write(folder: str, reason: str, groups: list[GroupTrace]) -> str:
    """Writes this process's own trace file (not torch's). Returns its path."""
    rank, host = _rank(groups), socket.gethostname()
    dump = Dump(rank, os.getpid(), host, time.time(), reason.partition("\n")[0], groups)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    for number in itertools.count():
        path = os.path.join(folder, f"c10d_custom-rank{rank}-{host}-{os.getpid()}-{number}.trace")
        try:
            os.close(os.open(path, file.NEW, 0o600))  # the name is ours
        except FileExistsError:
            continue
        file.put(path, file.to_text(dump).encode())
        return path
    raise AssertionError  # numbers have no end


def dump(config: Config, reason: str, frame: FrameType | None = None) -> None:
    """Writes the files that the environment asks for. ``frame``: where the main thread is."""
    groups = list(_groups().values())
    if inside_call(frame):
        _tell_frames(groups, frame)
    with contextlib.suppress(OSError):  # nobody here could be told
        if config.trace_dir:
            _write(config.trace_dir, reason, groups)
    with contextlib.suppress(Exception):
        if beginning := settings.flight_recorder_file():
            flight_recorder.write(beginning, _rank(groups), groups, config.trace)


def install_signal(config: Config) -> None:
    """Has C10D_CUSTOM_TRACE_SIGNAL write the files. Whoever else handles that signal is called, too. Our waits let
    Python's handlers run ten times a second."""
    if not config.trace_signal or _installed.get(config.trace_signal) is not None:
        return
    if threading.current_thread() is not threading.main_thread():
        raise UsageError(
            "C10D_CUSTOM_TRACE_SIGNAL: "
            "the first group of a process must be created in its main thread, as Python sets signal handlers there only"
        )
    number = config.trace_signal
    before = signal.getsignal(number)

    def handler(signum: int, frame: FrameType | None) -> None:
        dump(config, f"signal {signum}", frame)
        if callable(before):
            before(signum, frame)

    signal.signal(number, handler)
    _installed[number] = handler


_installed: dict[int, Callable[[int, FrameType | None], None]] = {}


# --- stacks

_DEPTH = 32  # frames of a stack that are kept
_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
_LIBRARIES = _OURS, os.path.dirname(distributed.__file__) + os.sep, threading.__file__


def stack(frame: FrameType | None) -> tuple[Frame, ...]:
    """From ``frame`` outwards, beginning where the libraries were called; nothing in a thread of theirs."""
    found: list[Frame] = []
    while frame is not None and len(found) < _DEPTH:
        code = frame.f_code
        if found or not code.co_filename.startswith(_LIBRARIES):
            found.append(Frame(code.co_filename, frame.f_lineno, code.co_name))
        frame = frame.f_back
    return tuple(found)


def inside_call(frame: FrameType | None) -> bool:
    """Whether code of ours is amid ``frame``, or has called it."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(_OURS):
            return True
        frame = frame.f_back
    return False


class CallStacks:
    """The stacks of one group's last calls. Any thread and any signal handler may note, and read."""

    def __init__(self, calls: int) -> None:
        self._notes: deque[tuple[int, float, tuple[Frame, ...]]] = deque(maxlen=2 * calls)

    def note(self, number: int) -> None:
        """A call is about to be made; ``number``: its number, 0 for a message."""
        self._notes.append((number, time.time(), stack(sys._getframe(1))))

    def tell(self, records: Iterable[Record]) -> None:
        """Gives the records their frames: a collective those noted last before its number, a message those noted last
        before its time."""
        notes = list(self._notes)
        by_number = sorted((float(number), i) for i, (number, _, _) in enumerate(notes) if number)
        by_time = sorted((when, i) for i, (_, when, _) in enumerate(notes))
        for record in records:
            among, at = (by_time, record.issued) if record.is_message else (by_number, record.number)
            if place := bisect_right(among, (at, len(notes))):
                record.frames = notes[among[place - 1][1]][2]
