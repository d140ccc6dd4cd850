"""A rank dies whose host's first rank cannot tell: torchrun ends the rest of a host as soon as one of its ranks is
lost. The ranks of the other host name the one that was lost first."""

import time

import pytest

from rig import Hosts

from .by_hand import Ranks

pytestmark = pytest.mark.skipif(Hosts.why_not() is not None, reason=str(Hosts.why_not()))

REDUCES = """
init()
dist.all_reduce(torch.ones(COUNT))
say(pid=os.getpid())
try:
    while True:
        dist.all_reduce(torch.ones(COUNT))
except RuntimeError as error:
    say(kind=type(error).__name__, text=str(error))
"""


@pytest.fixture(scope="module")
def hosts():
    with Hosts() as hosts:
        yield hosts


@pytest.mark.parametrize(
    "first, count",
    [
        ("is stopped", 4),
        ("has ended as well by the time they look", 1 << 18),
        *(
            pytest.param(*other, marks=pytest.mark.full("each loss, and each all_reduce, is above"))
            for other in (("is stopped", 1 << 18), ("has ended as well by the time they look", 4))
        ),
    ],
)
def test_the_rank_that_was_lost_first_is_named(hosts, first, count):
    places = ["hosta", "hosta", "hostb", "hostb"]
    with Ranks(hosts, places, REDUCES.replace("COUNT", str(count))) as job:
        pids = [job.line(rank)["pid"] for rank in range(4)]

        def send(signal, *ranks):
            for rank in ranks:
                # Rank 0 may have ended by itself, having heard of rank 1.
                hosts.run(places[rank], ["kill", f"-{signal}", pids[rank]])
            time.sleep(0.5)

        if first == "is stopped":
            send("STOP", 0)
            send("KILL", 1)
        else:
            send("STOP", 2, 3)
            send("KILL", 1)
            send("KILL", 0)
            send("CONT", 2, 3)
        try:
            for said in [job.line(rank) for rank in (2, 3)]:
                assert said["kind"] == "PeerLostError" and "rank 1 on hosta" in said["text"], said
        finally:
            hosts.run("hosta", ["kill", "-KILL", pids[0]])
