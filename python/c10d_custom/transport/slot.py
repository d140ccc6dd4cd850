"""One chunk of a large reduction under way between hosts: its buffers, which are kept from chunk to chunk and from call to call,
and the MPI requests that move them."""
from ctypes import c_void_p

from .mpi import Buffer

_KEPT = 4   # sizes of which a slot keeps its requests


class Slot:
    """``part``: bytes of this rank's share of the chunk, at most; ``hosts``: how many there are."""

    def __init__(self, part, hosts):
        self.mine = Buffer(part)
        self.theirs = [Buffer(part) for _ in range(hosts)]
        self.requests = []
        self._swaps, self._parts = {}, None

    def swap(self, link, nbytes, host, peer):
        """Persistent requests that send ``nbytes`` of its own to ``peer``, of that host, and receive as many."""
        if nbytes not in self._swaps:
            if len(self._swaps) == _KEPT:
                self.free()
            self._swaps[nbytes] = (link.pieces(link.comm.Recv_init, self.theirs[host].address, nbytes, peer)
                                   + link.pieces(link.comm.Send_init, self.mine.address, nbytes, peer))
        return self._swaps[nbytes]

    def parts(self, mine, at=0):
        """Addresses of what the hosts have given, in order; ``mine``: this host, whose begins at ``at``."""
        if at or self._parts is None:
            addresses = [t.address for t in self.theirs]
            addresses[mine] = self.mine.address + at
            made = (c_void_p * len(addresses))(*addresses)
            if at:
                return made
            self._parts = made
        return self._parts

    def free(self):
        for requests in self._swaps.values():
            for request in requests:
                request.Free()
        self._swaps.clear()
