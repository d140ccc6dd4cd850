"""What a transport offers.

Ownership: tensors named by a Call or Message belong to the caller, who keeps them alive until the
ticket is done. Threading: any method from any thread; collectives of one transport run in the order
they were issued, one at a time; messages are independent of them and of each other. Blocking: `run`,
`Ticket.wait` and `next_completed` block without the GIL; nothing else does.
"""
from abc import ABC, abstractmethod


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

    def standing(self):
        """(the operation, and whom it waits for), for the error of who gives up waiting while it is not done."""
        return "Work.wait", ""

    @property
    @abstractmethod
    def source(self):
        """The group rank a received message came from, once done; -1 otherwise."""


class Transport(ABC):
    quick = None            # the core's short ways, where there are any: see ShmTransport
    quick_message = None

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

    @abstractmethod
    def trace(self):
        """The last calls of this rank: a list of trace.record.Record, oldest first."""

    @abstractmethod
    def peers(self):
        """The group's ranks as this one sees them: a list of trace.record.Peer."""

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
