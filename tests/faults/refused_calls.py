"""A group's life where a sandbox refuses one system call, for each call that we make, on both of two ranks.

python tests/faults/refused_calls.py ["CALL ..." ...]      (prints JSON: what each rank got, by call and error)
"""

import errno
import json
import os
import platform
import sys
import time
from datetime import timedelta

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
from forked import ForkedRanks, serve_store, store_at
from limits import refuse

import c10d_custom

AT_ONCE = 4  # worlds
# Their numbers on x86_64 and aarch64; -1: there is none. Left out is what Python, torch's store or glibc do not live
# without: futex, mmap, mprotect, read, openat, fcntl, ioctl, poll, recvfrom, rseq, ...
CALLS = {
    "accept4": (288, 242),
    "bind": (49, 200),
    "clone3": (435, 435),
    "connect": (42, 203),
    "eventfd2": (290, 19),
    "fallocate": (285, 47),
    "fchmod": (91, 52),
    "flock": (73, 32),
    "fstat": (5, 80),
    "ftruncate": (77, 46),
    "get_mempolicy": (239, 236),
    "getcpu": (309, 168),
    "getpeername": (52, 205),
    "getrandom": (318, 278),
    "getsockname": (51, 204),
    "getsockopt": (55, 209),
    "listen": (50, 201),
    "lseek": (8, 62),
    "madvise": (28, 233),
    "mbind": (237, 235),
    "membarrier": (324, 283),
    "memfd_create": (319, 279),
    "mincore": (27, 232),
    "mlock": (149, 228),
    "move_pages": (279, 239),
    "munlock": (150, 229),
    "munmap": (11, 215),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "prctl": (157, 167),
    "prlimit64": (302, 261),
    "process_vm_readv": (310, 270),
    "readlink": (89, -1),
    "recvmsg": (47, 212),
    "rt_sigprocmask": (14, 135),
    "sched_getaffinity": (204, 123),
    "sched_setaffinity": (203, 122),
    "sched_yield": (24, 124),
    "sendmsg": (46, 211),
    "set_mempolicy": (238, 237),
    "setsockopt": (54, 208),
    "shutdown": (48, 210),
    "socket": (41, 198),
    "socketpair": (53, 199),
    "statx": (332, 291),
    "sysinfo": (99, 179),
    "uname": (63, 160),
}
ERRORS = {"EPERM": errno.EPERM, "ENOSYS": errno.ENOSYS}


TOGETHER = "fallocate memfd_create", "fallocate madvise", "munlock mlock madvise lseek flock"


def number(call):
    return CALLS[call][("x86_64", "aarch64").index(platform.machine())]


def life():
    """Every kind of memory that a group takes, and every thread."""
    rank = dist.get_rank()
    for group in (dist.group.WORLD, dist.new_group()):
        for count in (10, 200_000):
            total = torch.full((count,), rank + 1.0)
            dist.all_reduce(total, group=group)
            assert total[0] == total[-1] == 3
            parts = torch.empty(count)
            dist.all_to_all_single(parts, torch.full((count,), float(rank)), group=group)
            assert parts[0] == 0 and parts[-1] == 1
            got = torch.empty(count)
            sent = dist.isend(torch.full((count,), float(rank)), 1 - rank, group=group)
            dist.recv(got, 1 - rank, group=group)
            sent.wait()
            assert got[0] == got[-1] == 1 - rank
        ours = c10d_custom.empty(200_000, group=group).fill_(rank)
        dist.all_reduce(ours, group=group, async_op=True).wait()
        assert ours[0] == ours[-1] == 1
        roots = [torch.full((100_000,), float(rank)) for _ in range(2)] if rank == 0 else None
        dist.scatter(torch.empty(100_000), roots, 0, group=group)
    dist.destroy_process_group()


def run(rank, say, calls, error, port):
    store = store_at(port, f"{calls} {error}")
    for call in calls.split():
        refuse(number(call), ERRORS[error])
    began = time.monotonic()
    try:
        dist.init_process_group("custom", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=20))
        life()
        say(done=True, seconds=time.monotonic() - began)
    except dist.DistError as failed:
        say(error=f"{type(failed).__name__}: {failed}", seconds=time.monotonic() - began)


def main():
    torch.set_num_threads(1)
    c10d_custom.register()
    port, results, under_way = serve_store(), {}, {}

    def finish():
        name, ranks = next(iter(under_way.items()))
        del under_way[name]
        stuck = ranks.finish(40)
        results[name] = {"stuck": stuck, "codes": ranks.codes, "said": ranks.said}

    for calls in sys.argv[1:] or (*CALLS, *TOGETHER):
        if any(number(call) < 0 for call in calls.split()):
            continue
        for error in ERRORS:
            if len(under_way) == AT_ONCE:
                finish()
            under_way[f"{calls} {error}"] = ForkedRanks(2, run, calls, error, port)
    while under_way:
        finish()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
