"""What a transport offers.

Ownership: tensors named by a Call or Message belong to the caller, who keeps them alive until the
ticket is done. Threading: any method from any thread; collectives of one transport run in the order
they were issued, one at a time; messages are independent of them and of each other. Blocking: `run`,
`Ticket.wait` and `next_completed` block without the GIL; nothing else does.
"""

from abc import ABC, abstractmethod

from ..errors import UsageError


class Ticket(ABC):
    """One operation under way."""

    @abstractmethod
    def done(self):
        """True once it has ended, well or not."""

    @abstractmethod
    def wait(self, seconds, may_run=False):
        """Waits up to ``seconds``. Returns done(). ``may_run``: this thread may do the work itself, and
        then stays until it is done."""

    @abstractmethod
    def error(self):
        """The exception it ended with, or None. Only once done."""

    @abstractmethod
    def watch(self, token):
        """Asks for ``token`` to come out of next_completed when the operation ends. False: it has
        ended already, and will not."""

    @abstractmethod
    def withdraw(self):
        """Takes the operation back, if it is not done: once this returns it is, and nothing touches its tensors. A
        collective, and a message of which bytes may have moved, end the group (abort) for all its ranks."""

    def standing(self):
        """(the operation, and whom it waits for), for the error of who gives up waiting while it is not done."""
        return "Work.wait", ""

    @property
    def collective(self):
        """Whether it is a collective, which takes its turn."""
        return False

    @property
    @abstractmethod
    def source(self):
        """The group rank a received message came from, once done; -1 otherwise."""


class Transport(ABC):
    """Leaving a call by an exception that is not its own (a signal handler's, Ctrl-C): `run` has aborted the group
    before the exception leaves; of what has a Ticket, whoever lets the exception leave its wait withdraws it.

    Being called on top of itself: a thread that is amid a collective of this transport, in a signal handler or a
    callback, and runs or awaits another gets UsageError at once, and the outer one goes on."""

    fast_collective = None  # the core's fast paths, where there are any: see ShmTransport
    fast_message = None

    @abstractmethod
    def run(self, call):
        """Runs a collective in the calling thread, if nothing is under way. Raises its error."""

    @abstractmethod
    def submit(self, call):
        """Issues a collective; returns its Ticket at once."""

    @abstractmethod
    def post(self, message):
        """Issues a send or a receive; returns its Ticket at once."""

    @abstractmethod
    def next_completed(self, seconds):
        """The token of an operation that has ended; None after ``seconds``. Raises AbortedError once
        the transport is closed."""

    @abstractmethod
    def next_sequence(self):
        """Number of the next collective."""

    @abstractmethod
    def interrupted_here(self):
        """True in a signal handler that interrupted a call of this transport, in the same thread."""

    def inside(self, name):
        """The UsageError for ``name``, called in such a handler."""
        return UsageError(
            f"{name} of group {self.name or '(unnamed)'}, rank {self.rank}: this thread is amid {self.under_way()} of "
            "the same group, "
            "which cannot end before this call returns (a signal handler, a callback or __del__ has called it). Call "
            "it "
            "afterwards, or use another group there."
        )

    @abstractmethod
    def under_way(self):
        """The collective under way, for an error: its name and number."""

    @abstractmethod
    def trace(self):
        """The last calls of this rank: a list of trace_file.Record, oldest first."""

    @abstractmethod
    def peers(self):
        """The group's ranks as this one sees them: a list of trace_file.Peer."""

    def failed(self, error):
        """Called with each exception made for a call that failed on the group. Whoever watches the transport
        replaces it."""

    @abstractmethod
    def abort(self):
        """Fails everything under way, here and on the other ranks. The group is of no more use."""

    @abstractmethod
    def leave(self):
        """Tells the other ranks, and fails what is under way here. Every ticket is done on return."""

    @abstractmethod
    def close(self):
        """Leaves, ends the transport's threads, frees its memory."""
