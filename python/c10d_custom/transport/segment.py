"""How the ranks of one host come to hold one segment.

Rank 0 creates a memfd, which has no name in any file system and vanishes with its last holder, and
hands it to each rank over an abstract Unix socket. The kernel says who is at the other end
(SO_PEERCRED): only processes of the same user are served, and only with the group's token.
"""
import contextlib
import os
import secrets
import socket
import struct
from ctypes import byref, c_int, c_uint64

from ..errors import CustomBackendError, TransportError
from .native import Geometry, lib

_TOKEN = 16
_SLICE = 10e-3  # s: between two looks at who is alive
_HELLO = struct.Struct(f"<{_TOKEN}sI")


def geometry(config, ranks):
    # Pairs grow with the square of the group: keep their sum within what 8 ranks take.
    cells = max(4, min(config.cells, config.cells * 64 // (ranks * ranks)))
    return Geometry(ranks, config.window, config.block_bytes, config.small_bytes, config.cell_bytes, cells)


def open_segment(exchange, config, interrupted):
    """Returns the native group handle of this rank. Any rank's failure is raised by all.
    ``interrupted``: see c10d_open."""
    rank, size = exchange.rank, exchange.size
    fd = -1
    with contextlib.ExitStack() as cleanup:
        failure = offer = server = None
        if rank == 0:
            try:
                fd = _create(config, size)
                cleanup.callback(lambda: fd >= 0 and os.close(fd))
                server = cleanup.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                token = secrets.token_bytes(_TOKEN)
                name = f"c10d_custom-{secrets.token_hex(16)}"
                server.bind("\0" + name)
                server.listen(size)
                offer = {"socket": name, "token": token.hex()}
            except (OSError, TransportError) as error:
                failure = f"rank 0 cannot create shared memory: {error}"
            exchange.say("segment", {"error": failure} if failure else offer)
        else:
            offer = exchange.hear("segment", "rank 0")
            failure = offer.get("error")
        handle = None
        if failure is None:
            try:
                if rank == 0:
                    _serve(server, fd, token, size, exchange)
                    mine, fd = fd, -1
                else:
                    mine = _fetch(offer, rank, exchange)
                handle = _open(mine, rank, config, interrupted)
            except (OSError, TransportError) as error:
                failure = f"rank {rank} cannot map the group's shared memory: {error}"
        try:
            exchange.gather_and_decide("mapped", failure, _all_well)
        except CustomBackendError:
            if handle is not None:
                lib.c10d_close(handle)
            raise
        return handle


def _all_well(failures):
    said = list(dict.fromkeys(f for f in failures if f))
    if said:
        raise TransportError("; ".join(said))


def _create(config, size):
    total = c_uint64()
    fd = lib.c10d_segment_create(byref(geometry(config, size)), byref(total))
    if fd < 0:
        raise OSError(-fd, os.strerror(-fd))
    return fd


def _serve(server, fd, token, size, exchange):
    waiting = set(range(1, size))
    while waiting:
        server.settimeout(min(_SLICE, exchange.left()))
        try:
            peer, _ = server.accept()
        except TimeoutError:
            exchange.require_all_alive()
            if exchange.left() > _SLICE:
                continue
            raise TransportError(f"ranks {sorted(waiting)} did not fetch the segment in time; processes "
                                 "with different network namespaces cannot reach each other") from None
        with peer:
            peer.settimeout(min(5.0, exchange.left()))
            _, uid, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            try:
                hello = peer.recv(_HELLO.size, socket.MSG_WAITALL)
                if uid != os.geteuid() or len(hello) != _HELLO.size:
                    continue
                said, rank = _HELLO.unpack(hello)
                if secrets.compare_digest(said, token) and rank in waiting:
                    socket.send_fds(peer, [b"s"], [fd])
                    waiting.discard(rank)
            except OSError:
                continue  # that process is gone; the deadline speaks for it


def _fetch(offer, rank, exchange):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.settimeout(exchange.left())
        peer.connect("\0" + offer["socket"])
        peer.sendall(_HELLO.pack(bytes.fromhex(offer["token"]), rank))
        _, fds, _, _ = socket.recv_fds(peer, 1, 1)
    if len(fds) != 1:
        raise TransportError("rank 0 refused to hand over the segment")
    os.set_inheritable(fds[0], False)
    return fds[0]


def _open(fd, rank, config, interrupted):
    error = c_int()
    handle = lib.c10d_open(fd, rank, config.spin_us * 1000, interrupted, byref(error))
    if not handle:
        raise OSError(error.value, os.strerror(error.value))
    return handle
