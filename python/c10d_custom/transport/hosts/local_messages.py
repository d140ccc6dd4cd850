"""Messages between ranks of one host in a group over several: the local transport carries them."""

from dataclasses import replace

from ..base import Ticket


class LocalMessages:
    """``local``: the transport inside this host; ``here``: the group ranks of it, in its order."""

    def __init__(self, local, here):
        self._local, self._here = local, here

    def post(self, message):
        """Issues a message to or from a rank of this host; returns its Ticket."""
        local = replace(message, peer=self._here.index(message.peer))
        return _LocalTicket(self._local.post(local), self._here)

    def post_from(self, message, source):
        """A receive from any source, once it is known that ``source`` has sent what it waits for."""
        return self.post(replace(message, peer=source))

    def probe(self, tag):
        """The group rank whose message of that tag waits for a receive from any source; -1: none."""
        source = self._local.probe(tag)
        return self._here[source] if source >= 0 else -1


class _LocalTicket(Ticket):
    """Names ranks as the group does."""

    def __init__(self, ticket, here):
        self._inner, self._here = ticket, here

    def done(self):
        return self._inner.done()

    def wait(self, seconds, may_run=False):
        return self._inner.wait(seconds, may_run)

    def error(self):
        return self._inner.error()

    def watch(self, token):
        return self._inner.watch(token)

    def withdraw(self):
        self._inner.withdraw()

    @property
    def source(self):
        source = self._inner.source
        return self._here[source] if source >= 0 else -1
