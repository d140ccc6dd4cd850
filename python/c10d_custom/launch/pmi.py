"""The launcher's side of PMI-1, the protocol in which libmpi of the MPICH family asks for the ranks of its job: where
no MPI launcher has started them.

libmpi sends lines, ``cmd=... key=value ...``, over a socket whose number is in PMI_FD, and reads the answers. Here both
ends are in one process. What a rank has put, all ranks may get once all have been in the next barrier: a barrier is all
that ranks need of each other. Few ranks get anything: MPICH's first of each host, for all of it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Protocol

from ..threads import select, socket, start, threading


class KeyValues(Protocol):
    """The store in which the ranks' libmpis tell each other what they need. Both methods may raise."""

    def meet(self, barrier: int, put: dict[str, str]) -> None:
        """Waits for all ranks in the barrier of that number. ``put``: what this rank has to tell them at it."""

    def all(self, barrier: int) -> dict[str, str]:
        """What all ranks have put up to that barrier, which is over."""


_BARRIER, _ACKNOWLEDGED = b"cmd=barrier_out rc=0\n", b"cmd=finalize_ack rc=0\n"
_LONGEST_VALUE = 4096
_SLICE = 20e-3  # s: between two looks at whether MPI has started
# What names a job's connection to its launcher. Of an outer one (of srun or mpirun, that started torchrun), it would
# contradict ours: MPICH takes PMI_FD and PMIX_NAMESPACE together for an error.
_OTHERS = ("PMI_", "PMI2_", "PMIX_", "PALS_", "HYDI_", "MPI_LOCAL")


class PmiServer:
    """One rank's. ``name``: the job's, like no other's: libmpi names files by it. ``nodes``: the number of each rank's
    host, from 0 on in the order of their first ranks."""

    def __init__(self, rank: int, size: int, name: str, nodes: Sequence[int], key_values: KeyValues) -> None:
        self.rank, self.size, self.name = rank, size, name
        self._key_values: KeyValues | None = key_values  # None: MPI has started
        # Numbers, which Python does not close when it ends: libmpi's exit handlers come later. Child processes do not
        # get them.
        self._ours, self._theirs = (end.detach() for end in socket.socketpair())
        self._put: dict[str, str] = {}
        self._known = {"PMI_process_mapping": process_mapping(nodes)}
        self._unread = b""
        self._barriers = self._known_after = 0  # that have been; the last whose key values are known
        self._thread: threading.Thread | None = None
        self._wake, self._waker = os.pipe()
        self._closed = False  # by libmpi

    @contextlib.contextmanager
    def environment(self) -> Iterator[None]:
        """Inside, MPI finds this server, and no other launcher: not longer, since children inherit the environment."""
        hidden = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith(_OTHERS)}
        ours = {"PMI_FD": str(self._theirs), "PMI_RANK": str(self.rank), "PMI_SIZE": str(self.size)}
        os.environ.update(ours)
        try:
            yield
        finally:
            for name in ours:
                os.environ.pop(name, None)
            os.environ.update(hidden)

    def serve(self, started: Callable[[], bool], check: Callable[[], object] = lambda: None) -> None:
        """Answers until ``started``. Raises what ``key_values`` do, or ``check``, called now and then; libmpi then
        waits for its answer for ever."""
        while not started():
            if self.asked(_SLICE):
                self._answer()
            check()

    def asked(self, seconds: float) -> bool:
        """Whether libmpi waits for an answer, or does within that time."""
        return bool(select.select([self._ours], [], [], seconds)[0])

    def go_on(self) -> None:
        """In a thread, once MPI has started: libmpi may end without the other ranks, and whoever asks for more
        (MPI_Comm_spawn, say) is told no."""
        self._key_values = None
        self._thread = start(self._run, "c10d_custom:pmi")

    def end(self, finalized: bool) -> None:
        """libmpi takes its leave in an exit handler, when no thread of Python's runs any more: it finds its answers.
        ``finalized``: MPI_Finalize has been called; else somebody's exit handler may."""
        os.write(self._waker, b"x")
        if self._thread is not None:
            self._thread.join()
        with contextlib.suppress(OSError):  # Intel MPI has closed its end by now
            os.write(self._ours, (b"" if finalized else _BARRIER) + _ACKNOWLEDGED)

    def _run(self) -> None:
        while not self._closed and self._wake not in select.select([self._ours, self._wake], [], [])[0]:
            self._answer()

    def _answer(self) -> None:
        data = os.read(self._ours, 1 << 16)
        self._closed = not data
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            if answer := self._to(_parsed(line.decode(errors="replace"))):
                os.write(self._ours, f"cmd={answer}\n".encode())

    def _to(self, asked: dict[str, str]) -> str | None:
        """Carries out a request. Returns what follows ``cmd=`` in the answer."""
        command = asked.get("cmd", asked.get("mcmd"))
        if command == "put":
            self._put[asked.get("key", "")] = asked.get("value", "")
            return "put_result rc=0 msg=success"
        if command == "get":
            # Of a key that nobody has put, too: libmpi goes on without.
            value = self._value(asked.get("key", ""))
            return "get_result rc=-1 msg=unknown_key" if value is None else f"get_result rc=0 msg=success value={value}"
        if command == "barrier_in":
            if self._key_values is not None:
                self._key_values.meet(self._barriers, self._put)
                self._put, self._barriers = {}, self._barriers + 1
            # else MPI_Finalize's, in which UCX's ranks wait for each other: this one has delivered what it sent
            return "barrier_out rc=0"
        if command in (None, "abort", "endcmd"):
            return None  # it ends by itself
        known = {
            "init": "response_to_init pmi_version=1 pmi_subversion=1 rc=0",
            "get_maxes": f"maxes kvsname_max=256 keylen_max=64 vallen_max={_LONGEST_VALUE}",
            "get_appnum": "appnum appnum=0",
            "get_my_kvsname": f"my_kvsname kvsname={self.name}",
            "get_universe_size": f"universe_size size={self.size}",
            "finalize": "finalize_ack rc=0",
        }
        return known.get(command, f"{command}_result rc=-1 msg=not_supported")

    def _value(self, key: str) -> str | None:
        """The others' are fetched for the first key that is not known without."""
        if key not in self._known and self._known_after < self._barriers and self._key_values is not None:
            self._known |= self._key_values.all(self._barriers - 1)
            self._known_after = self._barriers
        return self._known.get(key)


def _parsed(line: str) -> dict[str, str]:
    return dict(part.partition("=")[::2] for part in line.split(" ") if part)


def process_mapping(nodes: Sequence[int]) -> str:
    """PMI_process_mapping of ranks on these hosts: blocks of (first node, how many nodes, ranks on each), in rank
    order; a host may be in several. Without it libmpi would tell hosts apart by their names, which repeat."""
    blocks: list[tuple[int, int, int]] = []
    for node, ranks in ((node, sum(1 for _ in same)) for node, same in groupby(nodes)):
        first, count, each = blocks[-1] if blocks else (0, 0, 0)
        if first + count == node and each == ranks:
            blocks[-1] = first, count + 1, each
        else:
            blocks.append((node, 1, ranks))
    mapping = f"(vector,{','.join('({},{},{})'.format(*block) for block in blocks)})"
    # Too many for a value: each rank a node of its own, which costs MPI's shared memory only, of which we have no use.
    return mapping if len(mapping) < _LONGEST_VALUE else f"(vector,(0,{len(nodes)},1))"
