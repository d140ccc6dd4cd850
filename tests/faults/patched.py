"""Two ranks in a program whose standard library was patched before torch was imported, as gevent's monkey.patch_all()
does it: whoever of this package calls what was put in its place is told off.

python tests/faults/patched.py       (prints JSON: what each rank got)
"""

import _thread
import json
import os
import queue
import select
import socket
import sys
import threading
import time
from datetime import timedelta

os.environ["OMP_NUM_THREADS"] = "1"


class PatchedError(BaseException):
    pass


def in_place_of(original):
    def patched(*arguments, **named):
        frame = sys._getframe(1)
        while (caller := frame.f_globals["__name__"]) in {"threading", "queue", "socket", "selectors", __name__}:
            if (frame := frame.f_back) is None:
                return original(*arguments, **named)
        if caller.startswith("c10d_custom"):
            raise PatchedError(f"{original.__name__} in {caller}")
        return original(*arguments, **named)

    return patched


class Socket(socket.socket):
    """Waits, whatever its flags say."""

    def recvmsg(self, size, room=0, flags=0):
        return super().recvmsg(size, room, flags & ~socket.MSG_DONTWAIT)


def patch():
    Socket.__module__ = "patched"
    socket.socket = Socket
    for module, names in (
        (_thread, ("start_new_thread", "allocate_lock", "get_ident")),
        (time, ("sleep",)),
        (select, ("poll", "select")),
        (queue, ("SimpleQueue",)),
        (threading, ("Lock", "RLock", "Condition", "Event", "get_ident", "_allocate_lock", "_start_new_thread")),
    ):
        for name in names:
            if hasattr(module, name):
                setattr(module, name, in_place_of(getattr(module, name)))
    del select.epoll


patch()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from forked import ForkedRanks, serve_store, store_at  # noqa: E402

SECONDS = timedelta(seconds=20)


def run(rank, say, port):
    dist.init_process_group("custom", store=store_at(port, ""), rank=rank, world_size=2, timeout=SECONDS)
    t = torch.ones(4)
    dist.all_reduce(t)
    say(sum=t.tolist())
    called = []
    future = dist.all_reduce(t, async_op=True).get_future().then(lambda f: called.append(f.value()[0].tolist()))
    future.wait()
    say(called=called)
    large = torch.full((300_000,), float(rank))
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, large, 1 - rank), dist.P2POp(dist.irecv, t, 1 - rank, tag=1)]
    )
    dist.recv(large.clone(), 1 - rank)
    dist.send(torch.full((4,), float(rank)), 1 - rank, tag=1)
    for work in works:
        work.wait()
    say(received=t.tolist())
    group = dist.new_group(timeout=timedelta(seconds=0.3))
    if rank:
        time.sleep(0.6)
    else:
        try:
            dist.all_reduce(t, group=group)
        except dist.DistError as error:
            say(error=f"{type(error).__name__}: {error}")
    dist.destroy_process_group()


def main():
    torch.set_num_threads(1)
    ranks = ForkedRanks(2, run, serve_store())
    stuck = ranks.finish(60)
    print(json.dumps({"stuck": stuck, "codes": ranks.codes, "said": ranks.said}))


if __name__ == "__main__":
    main()
