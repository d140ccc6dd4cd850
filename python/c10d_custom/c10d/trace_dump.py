"""When and where the files of this process are written: on the first failure of each group, and on a signal; both only
if C10D_CUSTOM_TRACE_DIR names a folder.

A source is a transport: it has name, rank, size, members, trace() and peers(). Files are readable by their user only,
and no two have the same name: rank, host and pid, and a number counted up until the name is free.
"""

from __future__ import annotations

import itertools
import os
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

from ..errors import UsageError
from ..transport.trace_file import Dump, GroupTrace, write

if TYPE_CHECKING:
    from ..config import Config
    from ..transport.base import Transport


# By id; iterated over in copies that take no lock, as a signal may come at any time.
_sources: dict[int, weakref.ref[Transport]] = {}
_said: set[int] = set()  # ids of sources whose failure has been written


def follow(source: Transport, config: Config) -> None:
    """From now on files have this source, and are written when it fails or the signal comes."""
    key = id(source)
    _sources[key] = weakref.ref(source, lambda _: forget(None, key))  # not the source: that would keep it
    if config.trace_dir:
        of = weakref.ref(source)
        source.failed = lambda error: _failed(of(), key, error, config.trace_dir)  # type: ignore[method-assign]


def forget(source: Transport | None, key: int | None = None) -> None:
    key = id(source) if key is None else key
    _sources.pop(key, None)
    _said.discard(key)


def _failed(source: Transport | None, key: int, error: BaseException, folder: str) -> None:
    if source is None or key in _said:
        return
    _said.add(key)
    try:
        path = dump(folder, f"{type(error).__name__}: {error}")
    except OSError as problem:
        error.add_note(f"C10D_CUSTOM_TRACE_DIR: the trace could not be written: {problem}")
    else:
        error.add_note(f"This rank's last calls: {path} (all ranks together: python -m c10d_custom trace {folder}/*)")


def dump(folder: str, reason: str) -> str:
    """Writes the calls of all groups of this process. Returns the file's path."""
    sources = [s for s in (ref() for ref in list(_sources.values())) if s is not None]
    groups = [GroupTrace(s.name or "", s.rank, s.size, list(s.members), s.peers(), s.trace()) for s in sources]
    rank = next((g.members[g.rank] for g in groups), 0)
    host = socket.gethostname()
    text = write(Dump(rank, os.getpid(), host, time.time(), reason, groups)).encode()
    os.makedirs(folder, mode=0o700, exist_ok=True)
    for number in itertools.count():
        path = os.path.join(folder, f"c10d_custom-rank{rank}-{host}-{os.getpid()}-{number}.trace")
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            continue
        with os.fdopen(fd, "wb") as file:
            file.write(text)
        return path
    raise AssertionError  # numbers have no end


def install_signal(config: Config) -> None:
    """Has C10D_CUSTOM_TRACE_SIGNAL write the files. Whoever else handles that signal is called, too. Our waits let
    Python's handlers run ten times a second."""
    if not config.trace_signal or _installed.get(config.trace_signal) is not None:
        return
    if threading.current_thread() is not threading.main_thread():
        raise UsageError(
            "C10D_CUSTOM_TRACE_SIGNAL: the first group of a process must be created in its main thread, as "
            "Python sets signal handlers there only"
        )
    number = config.trace_signal
    before = signal.getsignal(number)

    def handler(signum: int, frame: FrameType | None) -> None:
        try:
            dump(config.trace_dir, f"signal {signum}")
        except OSError:
            pass  # nobody here could be told
        if callable(before):
            before(signum, frame)

    signal.signal(number, handler)
    _installed[number] = handler


_installed: dict[int, Callable[[int, FrameType | None], None]] = {}
