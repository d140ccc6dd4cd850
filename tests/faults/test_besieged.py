"""What is not a rank cannot hold the making of a group: a store that does not answer, strangers that connect, a
neighbour in a network namespace of its own."""

import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed import HashStore

from c10d_custom.c10d import process_group
from c10d_custom.c10d.issuing import NewGroup
from c10d_custom.creation.exchange import Exchange
from c10d_custom.errors import TransportError
from c10d_custom.transport.hosts.failure_detector import FailureDetector
from ecosystem.spawn import run
from harness import Layout

SECONDS = timedelta(seconds=2)
LONG = 20.0  # s: what ends by its own deadline of 2 s is over long before


def stopped_store(rank, size, folder):
    """The process of rank 0, which serves the store, is stopped while the others make groups."""
    port = folder + "/port"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        with open(port + ".new", "w") as f:
            f.write(f"{store.port} {os.getpid()}")
        os.rename(port + ".new", port)
        # torch names groups by how many a rank has tried to make.
        failure(
            lambda: dist.init_process_group(
                "custom",
                store=dist.PrefixStore("alone", store),
                rank=0,
                world_size=size,
                timeout=timedelta(seconds=0.3),
            )
        )
        found = []
    else:
        wait_for(port)
        number, server = map(int, open(port).read().split())
        store = dist.TCPStore("127.0.0.1", number, None, False)
        store.add("here", 1)
        while store.add("here", 0) < size - 1:
            time.sleep(0.01)
        found = [
            while_stopped(
                rank,
                server,
                folder + "/1",
                lambda: dist.init_process_group("custom", store=store, rank=rank, world_size=size, timeout=SECONDS),
            )
        ]
    # All together; then a group without the rank that serves the store.
    dist.init_process_group(
        "custom", store=dist.PrefixStore("again", store), rank=rank, world_size=size, timeout=timedelta(seconds=LONG)
    )
    dist.barrier()
    if rank:
        found.append(while_stopped(rank, server, folder + "/2", lambda: dist.new_group([1, 2], timeout=SECONDS)))
    dist.barrier()
    dist.destroy_process_group()
    return found


def while_stopped(rank, server, mark, call):
    """`failure` of the call on ranks 1 and 2; the server's process is stopped from before the first begins until both
    have ended."""
    if rank == 1:
        time.sleep(0.2)  # the last question of both has its answer
        os.kill(server, signal.SIGSTOP)
        try:
            found = failure(call)
            wait_for(mark)
        finally:
            os.kill(server, signal.SIGCONT)
    else:
        time.sleep(0.4)
        found = failure(call)
        open(mark, "w").close()
    return found


def wait_for(path):
    until = time.monotonic() + LONG
    while not os.path.exists(path) and time.monotonic() < until:
        time.sleep(0.01)


def failure(call):
    began = time.monotonic()
    with pytest.raises(TransportError) as caught:
        call()
    return time.monotonic() - began, str(caught.value)


@pytest.mark.skipif(
    Layout.chosen() is not None, reason="a job's own rendezvous is not served by a rank that may be stopped"
)
def test_a_store_whose_server_is_stopped(tmp_path):
    for found in run(stopped_store, 3, str(tmp_path), init=False)[1:]:
        assert len(found) == 2
        for seconds, text in found:
            assert (
                seconds < LONG and "127.0.0.1, port" in text and "has not answered for" in text and "stopped" in text
            ), found


SERVER = """
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
print(store.port, flush=True)
input()
"""


@pytest.mark.parametrize("restartable", [False, True])
def test_a_store_whose_server_has_ended(restartable, monkeypatch):
    """The error names the group and the rank, where the store is and what may be wrong with it."""
    if restartable:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        port = int(server.stdout.readline())
        store = dist.TCPStore("127.0.0.1", port, None, False)
        server.kill()
    with pytest.raises(TransportError, match=rf"creation of group g, rank 1: the store broke: .* port {port}\."):
        process_group.build(NewGroup(store, 1, 2, SECONDS, "g"))


def test_a_thousand_strangers():
    """They connect before the rank does, and say nothing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 4096), hard), hard))
    store, made, strangers = HashStore(), {}, []

    def join(rank):
        made[rank] = FailureDetector(Exchange(store, rank, 2, 60.0), [[0], [1]], print)

    try:
        first = threading.Thread(target=join, args=(0,))
        first.start()
        while not store.check(["failure_detector/0"]):
            time.sleep(0.01)
        port = Exchange(store, 1, 2, 60.0).hear("failure_detector/0", "rank 0")["port"]
        for i in range(1000):
            strangers.append(socket.create_connection(("127.0.0.1", port), 10))
            if i % 3 == 0:
                strangers[-1].sendall(b"GET / HT")
        began = time.monotonic()
        join(1)
        first.join(60)
        seconds = time.monotonic() - began
        assert made.keys() == {0, 1} and seconds < LONG, (
            seconds
        )  # one after the other, 5 s each, would take more than an hour
        print(f"after 1,000 strangers: {seconds:.3f} s")
    finally:
        for stranger in strangers:
            stranger.close()
        closing = [threading.Thread(target=watch.close) for watch in made.values()]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


RANK = """
import sys, time
from datetime import timedelta
import torch.distributed as dist
began = time.monotonic()
try:
    dist.init_process_group("custom", init_method="file://" + sys.argv[1], rank=int(sys.argv[2]), world_size=2,
                            timeout=timedelta(seconds=60))
    print("made")
except RuntimeError as error:
    print(f"{time.monotonic() - began:.3f} {type(error).__name__} {error}")
"""


def test_two_pods_of_one_machine(tmp_path):
    """One boot id, two network namespaces: two hosts. Without a network between them both are told so, at once."""
    apart = ["unshare", "--net"]
    if shutil.which("unshare") is None or subprocess.run([*apart, "true"], capture_output=True).returncode:
        pytest.skip("making a network namespace takes unshare (util-linux) and root")
    ranks = [
        subprocess.Popen(
            [*before, sys.executable, "-c", RANK, str(tmp_path / "store"), str(rank)],
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank, before in enumerate(([], apart))
    ]
    for said in [rank.communicate(timeout=90)[0] for rank in ranks]:
        seconds, kind, text = said.splitlines()[-1].split(" ", 2)
        assert kind == "TransportError" and "network namespaces of their own" in text and "Ranks 0 and 1" in text, said
        assert float(seconds) < LONG, said
