"""Groups under resource limits: an error on every rank, soon, and no signal.

python tests/faults/limits.py CASE         (prints JSON: what each of two ranks got)
"""

import ctypes
import errno
import json
import os
import platform
import resource
import signal
import struct
import sys
import time
from datetime import timedelta

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
from forked import ForkedRanks, serve_store, store_at

import c10d_custom
import c10d_custom.c10d.process_group
import c10d_custom.transport.shm.error_text  # noqa: F401  a rank that has become another user cannot read it any more

MB = 1 << 20
NOBODY = 65534
PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_FILTER = 4, 38, 22, 2
FALLOCATE, MADVISE = {"x86_64": (285, 28), "aarch64": (47, 233)}.get(platform.machine(), (0, 0))


def limit(what, value):
    resource.setrlimit(what, (value, value))


def address_space():
    """What this process has of it now."""
    with open("/proc/self/statm") as f:
        return int(f.read().split()[0]) * resource.getpagesize()


def no_fallocate():
    """As under vm.overcommit_memory=2, or in a full cgroup."""
    refuse(FALLOCATE, errno.ENOMEM)


def no_pages():
    """Neither way to get them."""
    refuse(FALLOCATE, errno.EPERM)
    refuse(MADVISE, errno.EPERM)


def refuse(call, error):
    """From now on that call says so: seccomp answers for the kernel."""
    load, jump, give = 0x20, 0x15, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_RET|K
    program = b"".join(
        struct.pack("HBBI", *line)
        for line in ((load, 0, 0, 0), (jump, 0, 1, call), (give, 0, 0, 0x00050000 | error), (give, 0, 0, 0x7FFF0000))
    )
    code = ctypes.create_string_buffer(program)
    whole = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code)))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or prctl(PR_SET_SECCOMP, SECCOMP_FILTER, whole, 0, 0):
        raise OSError(ctypes.get_errno(), "no seccomp here")


def become_nobody():
    os.setuid(NOBODY)
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # /proc/self is its own again


def no_threads():
    become_nobody()  # for whom the limit counts, as it does not for root
    limit(resource.RLIMIT_NPROC, 1)


def in_cgroup(bytes):
    folder = f"/sys/fs/cgroup/memory/c10d_custom-{os.getpid()}-{bytes}"
    os.mkdir(folder)
    with open(f"{folder}/memory.limit_in_bytes", "w") as f:
        f.write(str(bytes))
    return folder


def enter(folder):
    with open(f"{folder}/cgroup.procs", "w") as f:
        f.write(str(os.getpid()))


# case: (before the group is made, after it), on the rank it is for; environment
CASES = {
    "no memory at creation": (0, no_fallocate, None, {}),
    "a small address space": (
        1,
        lambda: limit(resource.RLIMIT_AS, address_space() + 32 * MB),
        None,
        {"C10D_CUSTOM_BLOCK_BYTES": str(16 * MB)},
    ),
    "small files": (0, lambda: limit(resource.RLIMIT_FSIZE, MB), None, {}),
    "small files, and a signal": (
        0,
        lambda: (signal.signal(signal.SIGXFSZ, signal.SIG_DFL), limit(resource.RLIMIT_FSIZE, MB)),
        None,
        {},
    ),
    "small files elsewhere": (1, lambda: limit(resource.RLIMIT_FSIZE, MB), None, {}),
    "a small cgroup": (0, lambda: enter(os.environ["CGROUP"]), None, {"C10D_CUSTOM_BLOCK_BYTES": str(16 * MB)}),
    "a cgroup that fills": (None, None, lambda: enter(os.environ["CGROUP"]), {}),
    "no memory for messages": (0, None, no_fallocate, {}),
    "no call that makes memory for messages": (0, None, no_pages, {}),
    "no call that makes memory for large collectives": (0, None, no_pages, {}),
    "no memory for all_to_all": (0, None, no_fallocate, {}),
    "no memory for large collectives": (0, None, no_fallocate, {}),
    "no thread for collectives": (None, None, no_threads, {}),
    "no thread for messages": (None, None, no_threads, {}),
    "a rank that becomes another user": (0, None, lambda: os.setuid(NOBODY), {}),
    **{
        f"{k} more files on rank {rank}": (rank, lambda k=k: limit(resource.RLIMIT_NOFILE, free_number() + k), None, {})
        for rank in (0, 1)
        for k in range(6)
    },
}


def free_number():
    fd = os.dup(0)
    os.close(fd)
    return fd


def exchange(case, rank):
    total = torch.ones(10)
    if "fills" in case:
        parts, whole = torch.ones(MB // 4), torch.ones(MB // 4)
        for group in [dist.new_group() for _ in range(20)]:  # 20 MiB each
            dist.all_to_all_single(parts, whole, group=group)
    elif "another user" in case:
        for ranks in ([0, 1], [1, 0]):
            dist.all_reduce(total, group=dist.new_group(ranks))
    elif "messages" in case:
        total = torch.ones(200_000)  # a short one is sent before it needs a thread
        if "thread" not in case:
            dist.isend(total, 1).wait() if rank == 0 else dist.recv(total, 0)
        elif rank == 0:
            works = [dist.isend(total, 1, tag=1), dist.isend(total, 1), dist.irecv(total.clone(), 1, tag=2)]
            dist.barrier()  # which the other comes to once it has the first
            for work in works:
                work.wait()
        else:
            dist.recv(total, 0, tag=1)
            dist.barrier()
            dist.recv(total, 0)
            dist.send(total, 0, tag=2)
    elif "all_to_all" in case:
        dist.all_to_all_single(torch.empty(200_000), torch.ones(200_000))
    elif "large collectives" in case:
        dist.all_reduce(torch.ones(200_000))
    elif "collectives" in case:
        works = [dist.all_reduce(total, async_op=True) for _ in range(3)]
        dist.all_reduce(total)  # after those that nobody has waited for
        works[0].wait()
        futures = [dist.all_reduce(total, async_op=True).get_future() for _ in range(2)]
        strided = torch.ones(4, 4).t()
        dist.all_reduce(strided, async_op=True).wait()
        timed = dist.all_reduce(total, async_op=True)
        timed.wait(timedelta(seconds=10))
        torch.futures.collect_all(futures).wait()
        dist.all_reduce(total, async_op=True)  # left to the group's end
        assert total[0] in (2.0**7, 2.0**8) and strided.eq(2).all(), (total, strided)
    else:
        other = torch.full((200_000,), float(rank))
        work = dist.isend(torch.full((200_000,), float(rank)), 1 - rank)
        dist.recv(other, 1 - rank)
        work.wait()
        assert other[0] == other[-1] == 1 - rank
        dist.all_reduce(total, async_op=True).wait()
        assert total.tolist() == [2.0] * 10


def run(rank, say, case, port):
    which, before, after, environment = CASES[case]
    os.environ.update(environment)
    store = store_at(port, case)
    if before and rank == which:
        before()
    began = time.monotonic()
    try:
        dist.init_process_group("custom", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=20))
        say(made=True)
        if after and which in (rank, None):
            after()
        exchange(case, rank)
        say(done=True)
    except dist.DistError as error:
        say(error=f"{type(error).__name__}: {error}", seconds=time.monotonic() - began)
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)


def main():
    torch.set_num_threads(1)
    c10d_custom.register()  # or torch, at the first group of that name, reads the entry points of all packages
    results = {}
    port = serve_store()
    for case in sys.argv[1:]:
        folder = None
        if "cgroup" in case:
            try:
                os.environ["CGROUP"] = folder = in_cgroup((128 if "fills" in case else 256) * MB)
            except OSError as error:
                results[case] = f"no cgroup of memory can be made here: {error}"
                continue
        ranks = ForkedRanks(2, run, case, port)
        stuck = ranks.finish(40)
        results[case] = {"stuck": stuck, "codes": ranks.codes, "said": ranks.said}
        if folder:
            os.rmdir(folder)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
