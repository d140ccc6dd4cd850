"""What a transport offers.

Ownership: tensors named by a Call or Message belong to the caller, who keeps them alive until the
ticket is done. Threading: any method from any thread, unless it says otherwise; collectives of one transport run in the
order they were issued, one at a time; messages are independent of them and of each other. Blocking: `run`, `agree`, the
fast paths, `Ticket.wait` and `next_completed` block without the GIL; nothing else does, but `leave` and `close` wait
for the transport's own threads. Time-outs of calls are seconds, where a name does not say nanoseconds; none is without
end. They run from when the call could begin: a collective's turn, and for a message `Ticket.want`.

A collective or a message may raise these, or have them as its ticket's error (errors.py). UsageError: this process
cannot make the call; it does not end the group. CollectiveMismatchError and CollectiveTimeoutError: a collective's end
the group, for all its ranks; a message's do not. PeerLostError, AbortedError, TransportError: they always end it, for
all its ranks.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from .. import native
from ..call import Call
from ..errors import (
    AbortedError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CustomBackendError,
    PeerLostError,
    TransportError,
    UsageError,
)

if TYPE_CHECKING:
    import torch

    from ..call import Agreement, Message
    from ..native import Failure, PeerState
    from .call_log import Peer, Record

SHRINKS = 1 << 31  # of a rank's mark

_KINDS = {
    native.TIMEOUT: (CollectiveTimeoutError, "timed out"),
    native.PEER_LOST: (PeerLostError, "a rank has died, or left the group"),
    native.MISMATCH: (CollectiveMismatchError, "the ranks called different things"),
    native.ABORTED: (AbortedError, ""),
    native.INTERRUPTED: (AbortedError, "a signal handler raised amid it"),
    native.USAGE: (UsageError, "the native core refused these arguments"),
    native.FORKED: (UsageError, "a forked child cannot use its parent's group: create one in the child"),
    native.EXHAUSTED: (TransportError, "there was no memory or no thread"),
}


def rank_name(members: Sequence[int], rank: int) -> str:
    return f"rank {rank}" if members[rank] == rank else f"rank {rank} (global rank {members[rank]})"


def is_out_of_reach(problem: Exception) -> bool:
    """Whether that is what says that a module cannot be loaded, or is half gone at the interpreter's end. (A signal
    handler may raise anything at any moment, a TimeoutError often.)"""
    missing = isinstance(problem, (ImportError, OSError)) and not isinstance(problem, TimeoutError)
    return missing or sys.is_finalizing()


def plain_error(transport: Transport, failure: Any, call: Any, problem: BaseException) -> CustomBackendError:
    """The exception for a failure where what words it (failure.py) cannot be loaded or asked: with ``problem``, as
    where the interpreter is ending. Of its class, with what the numbers say."""
    found = failure.status == native.BROKEN
    kind, what = _KINDS.get(failure.cause if found else failure.status, (CustomBackendError, "failed"))
    about = what or transport.ended
    if failure.peer >= 0 and kind in (PeerLostError, CollectiveTimeoutError, CollectiveMismatchError):
        about += f" ({rank_name(transport.members, failure.peer)})"
    if found and failure.by not in (-1, transport.rank):
        about += f", found by {rank_name(transport.members, failure.by)}"
    number = f" #{failure.call}" if failure.call else ""
    me = rank_name(transport.members, transport.rank)
    where = f"{call.name}{number} of group {transport.name or '(unnamed)'}, {me}"
    more = "" if kind is AbortedError else f" (More cannot be told: {type(problem).__name__}: {problem})"
    return kind(f"{where}: {about}, after {failure.elapsed_ns / 1e9:.3f} s.{more}")


class Ticket(ABC):
    """One operation under way. Any thread may ask; whoever drops the ticket of what is not done lets it go on."""

    @abstractmethod
    def done(self) -> bool:
        """True once it has ended, well or not."""

    @abstractmethod
    def wait(self, seconds: float, may_run: bool = False) -> bool:
        """Waits up to ``seconds``. Returns done(). ``may_run``: this thread may do the work itself, and
        then stays until it is done."""

    @abstractmethod
    def error(self) -> BaseException | None:
        """The exception it ended with, or None. Only once done."""

    @abstractmethod
    def watch(self, token: int) -> bool:
        """Asks for ``token`` to come out of next_completed when the operation ends. False: it has
        ended already, and will not."""

    def want(self) -> None:
        """Somebody waits for it, or will ask until it is done: the time-out of a message runs from the first time (that
        of a collective, from its turn). `wait` does this, too."""

    @abstractmethod
    def withdraw(self) -> None:
        """Takes the operation back, if it is not done: once this returns it is, and nothing touches its tensors. A
        collective, and a message of which bytes may have moved, end the group (abort) for all its ranks."""

    def standing(self) -> tuple[str, str]:
        """(the operation, and whom it waits for), for the error of who gives up waiting while it is not done."""
        return "Work.wait", ""

    @property
    def collective(self) -> bool:
        """Whether it is a collective, which takes its turn."""
        return False

    @property
    @abstractmethod
    def source(self) -> int:
        """The group rank a received message came from, once done; -1 otherwise."""


if TYPE_CHECKING:

    class FastCollective(Protocol):
        def __call__(self, op: int, source: Any, target: Any, root: int, redop: Any, nanoseconds: int, /) -> int:
            """As `run` of native.direct.FastCollective. A status that is neither OK nor SLOW_PATH is a
            failure, and `last_error` of the same thread says how."""

    class FastSubmit(Protocol):
        def __call__(
            self, op: int, source: Any, target: Any, root: int, redop: Any, nanoseconds: int, /
        ) -> Ticket | None:
            """The same without waiting: the collective's Ticket, or None with nothing done."""

    class FastMessage(Protocol):
        def __call__(
            self,
            tensors: Sequence[torch.Tensor],
            is_recv: bool,
            peer: int,
            tag: int,
            nanoseconds: int,
            wait: int,
            posted: list[Any],
            /,
        ) -> int:
            """Posts a message and waits up to ``wait`` ns for its end. ``tensors``: one, plain, on the CPU, with
            elements; ``peer``: a group rank; ``nanoseconds``: the time-out. 0 if it is over. Else what `posted_message`
            makes its Ticket of is in ``posted``; nothing is, and nothing was done, for other arguments and once the
            group is closed. (What a function returns may be lost to a signal handler that raises; what is in the
            caller's list is not.)"""


class Transport(ABC):
    """Leaving a call by an exception that is not its own (a signal handler's, Ctrl-C): `run` has aborted the group
    before the exception leaves; of what has a Ticket, whoever lets the exception leave its wait withdraws it.

    Being called on top of itself: a thread that is amid a collective of this transport, in a signal handler or a
    callback, and runs or awaits another gets UsageError at once, and the outer one goes on.

    ``rank`` of ``size``: this one's among the group's ranks, by which calls name them; ``members``: the global rank of
    each; ``name``: the group's, "" if it has none."""

    rank: int
    size: int
    name: str
    members: list[int]
    ended: str = "the group was aborted or destroyed"  # what an error says of that

    # --- collectives and messages

    @abstractmethod
    def run(self, call: Call) -> None:
        """Runs a collective in the calling thread, if nothing is under way; else after what is. Raises its error."""

    @abstractmethod
    def submit(self, call: Call) -> Ticket:
        """Issues a collective; returns its Ticket at once."""

    @abstractmethod
    def post(self, message: Message) -> Ticket:
        """Issues a send or a receive; returns its Ticket at once."""

    @abstractmethod
    def agree(self, call: Call, seconds: float) -> Agreement:
        """All ranks see that they call ``call`` alike, and wait for each other up to ``seconds``; no bytes move. One of
        the group's collectives: raises as `run`."""

    # --- the fast paths: plain CPU tensors, in the calling thread, whatever is not needed left out

    # None where a transport has none, which may change while it lives. Who finds one calls it at once, and `run`,
    # `submit` or `post` otherwise.
    fast_collective: FastCollective | None = None
    fast_submit: FastSubmit | None = None
    fast_message: FastMessage | None = None

    def last_error(self, call: Call) -> BaseException:
        """The exception for the failure of the calling thread's last `fast_collective`, which was ``call``. Of
        transports that have that path."""
        raise NotImplementedError

    def posted_message(self, posted: list[Any], call: tuple[Any, ...]) -> Ticket:
        """The Ticket of what `fast_message` has put in ``posted``, which is None afterwards. ``call``: a function, and
        its arguments, that makes the Message, for what errors say. Of transports that have that path."""
        raise NotImplementedError

    # --- memory of which its collectives need no copy

    def has_arena(self) -> bool:
        """Returns whether `take` gives memory, as far as is known."""
        return False

    def take(self, bytes: int) -> Any:
        """A writable buffer of so many bytes, at least one, which is given back once nobody refers to it. Valid also
        after `close`. None where this process turns out to have no addresses for such memory. Raises TransportError
        where there is not so much, AbortedError once the transport is closed."""
        raise NotImplementedError

    # --- what has ended

    @abstractmethod
    def next_completed(self, seconds: float) -> int | None:
        """The token of an operation that has ended; None after ``seconds``. Raises AbortedError once
        the transport is closed."""

    @abstractmethod
    def complete(self, token: int) -> None:
        """Lets ``token`` come out of next_completed: for tickets that somebody above carries out."""

    @abstractmethod
    def next_sequence(self) -> int:
        """Number of the next collective; the first is 1."""

    # --- monitored barriers (c10d/monitored_barrier.py), which are made of messages

    @abstractmethod
    def enter_monitored_barrier(self, number: int) -> None:
        """This rank enters its monitored barrier of that number; the first is 1."""

    @abstractmethod
    def in_a_collective_instead(self, number: int) -> tuple[bool, list[int]]:
        """This rank waits in its monitored barrier ``number``. Have others begun the group's next collective, which
        this rank has not issued, instead of coming to the barrier? Returns two answers. First, whether a rank of this
        host is in that collective and has not entered the barrier, or runs Op.monitored_barrier, which tells others of
        one. Second, the ranks of other hosts that have begun it, perhaps after they had passed the barrier."""

    # --- being called on top of itself

    @abstractmethod
    def interrupted_here(self) -> bool:
        """True in a signal handler that interrupted a call of this transport, in the same thread."""

    def inside(self, name: str) -> UsageError:
        """The UsageError for ``name``, called in such a handler."""
        return UsageError(
            f"{name} of group {self.name or '(unnamed)'}, rank {self.rank}: this thread is amid {self.under_way()} of "
            "the same group, which cannot end before this call returns (a signal handler, a callback or __del__ has "
            "called it). Call it afterwards, or use another group there."
        )

    @abstractmethod
    def under_way(self) -> str:
        """The collective under way, for an error: its name and number."""

    # --- what it remembers; both from signal handlers, too

    @abstractmethod
    def trace(self) -> list[Record]:
        """The last calls of this rank, oldest first."""

    @abstractmethod
    def peers(self) -> list[Peer]:
        """The group's ranks as this one sees them, in their order."""

    # --- failing, and the end

    @abstractmethod
    def broken(self) -> bool:
        """True if the next call of this group fails: a rank is gone, or a call has failed."""

    @abstractmethod
    def gone(self) -> dict[int, str]:
        """{rank: what has become of it, for an error} of the ranks that are known to have died or to have left the
        group. None, once it is closed."""

    @abstractmethod
    def shrinking(self) -> list[int]:
        """The ranks that are known to have called shrink_group."""

    _listeners: tuple[Callable[[BaseException], object], ...] = ()

    def on_failure(self, listener: Callable[[BaseException], object]) -> None:
        """From now on ``listener`` is called with each exception made for a call that failed on the group, in the
        thread that made it."""
        self._listeners = (*self._listeners, listener)

    def failed(self, error: BaseException) -> None:
        """Tells the listeners of `on_failure` of an exception made for a call that failed."""
        for listener in self._listeners:
            listener(error)

    @abstractmethod
    def abort(self) -> None:
        """Fails everything under way, here and on the other ranks. The group is of no more use. From signal handlers,
        too."""

    @abstractmethod
    def interrupt(self) -> None:
        """`abort`, because a signal handler has raised amid a call: the other ranks are told so."""

    @abstractmethod
    def leave(self) -> None:
        """Tells the other ranks, and fails what is under way here. Every ticket is done on return. Not in a signal
        handler that has interrupted a call of the transport."""

    @abstractmethod
    def close(self) -> None:
        """Leaves, ends the transport's threads, frees its memory. Where `leave` may be called; once."""


CLOSED = 1


class LocalTransport(Transport):
    """Of CPU tensors, and of ranks that share a host and so see each other's state in shared memory. ``who``: how
    errors name a rank of the group."""

    who: Callable[[int], str]

    # --- for a transport over several hosts, of which this is the part inside one

    @property
    @abstractmethod
    def handle(self) -> int:
        """The native group, for who calls the core itself. Valid until `close`."""

    @abstractmethod
    def health(self, number: int) -> Failure | None:
        """Why the group is of no more use, at least not for the collective ``number``; None if it is."""

    @abstractmethod
    def monitored_barriers(self, rank: int) -> int:
        """Returns how many monitored barriers a rank has entered."""

    @abstractmethod
    def end_for_all(self, status: int, peer: int, by: int, number: int) -> None:
        """Ends the group on all ranks for a reason that came from elsewhere: a status of native. ``peer``, ``by``: any
        numbers, which Failures will show; ``number``: of the collective that it is the failure of."""

    @abstractmethod
    def probe(self, tag: int) -> int:
        """The rank whose message of that tag waits for a receive from any source; -1: none."""

    @abstractmethod
    def attempt(self, args: Any) -> Failure | None:
        """Runs the collective of a reference to native.CallArgs in the calling thread. None, or what went wrong. Raises
        what a signal handler has raised meanwhile."""

    @abstractmethod
    def announce(self, call: Call, seconds: float) -> int:
        """One of the group's collectives, whose parts do not differ: tells the other ranks of it, compares it with what
        those have called that have come, and waits for none, but up to ``seconds`` for one that is many calls behind.
        Returns its number. Raises as `run`."""

    @abstractmethod
    def verdict(self, name: str, number: int, seconds: float) -> BaseException | None:
        """The exception for the call of that name, announced as collective ``number`` so many seconds ago, if the group
        has failed."""

    @abstractmethod
    def meet(self, call: Call, number: int, seconds: float) -> None:
        """All ranks wait for each other, up to ``seconds``, amid ``call``, which is the collective ``number``. By the
        thread that carries it out. Raises as `run`."""

    @abstractmethod
    def states(self, sequence: int) -> list[PeerState] | None:
        """Of every rank, with the fingerprint it published for that sequence number (0: none is asked for); None once
        the group is closed."""

    @abstractmethod
    def set_mark(self, mark: int) -> None:
        """A number that the other ranks see until this one sets another; 0 at first. With SHRINKS among its bits: this
        rank has called shrink_group."""

    def holds_nothing(self) -> None:
        """Says that this rank has no memory of another's GPU open, nor will have: by the mark CLOSED."""
        self.set_mark(CLOSED)

    @abstractmethod
    def unmarked(self, mark: int) -> list[int]:
        """The other ranks that are there and have not set their mark to ``mark``."""
