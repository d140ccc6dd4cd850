"""Groups over two jobs on two hosts. On one host: tests/ecosystem/test_two_jobs.py."""

import pytest

from rig import Hosts

from .by_hand import Ranks

pytestmark = pytest.mark.skipif(Hosts.why_not() is not None, reason=str(Hosts.why_not()))

JOBS = """
from torch.distributed import distributed_c10d as c10d
def joined(name, members):
    # The sum over a group of these processes, of which each knows nothing but the store; or the error.
    me = members.index(RANK)
    port = int(os.environ["MASTER_PORT"]) + 100 + ord(name[0])
    address = os.environ["FIRST" if members[0] % 2 == 0 else "SECOND"]
    store = dist.TCPStore(address, port, None, me == 0, timedelta(seconds=60), wait_for_workers=False)
    try:
        group, _ = c10d._new_process_group_helper(2, me, [], "custom", store, name, timeout=timedelta(seconds=60))
    except dist.DistBackendError as error:
        return [type(error).__name__, str(error)], store
    x = torch.arange(100_000.0) * (RANK + 1)
    group.allreduce([x]).wait()
    return [(x / torch.arange(100_000.0))[-1].item(), ""], store
SIZE = 2  # of the first job
mine = joined("first", [2, 3]) if RANK >= 2 else (init(port=1), None)
far = joined("apart", [0, 3]) if RANK in (0, 3) else (None, None)
near = joined("one host", [0, 2]) if RANK in (0, 2) else (None, None)
say(mine=mine[0], far=far[0], near=near[0])
sys.stdin.read()  # the stores' servers go last
"""


def test_trainer_and_engine():
    """Ranks 0 and 1 are a job over both hosts; 2 and 3 share no default group, and their group, the first over hosts,
    starts MPI. A group of one of each job is refused over hosts, and serves on one."""
    with Hosts() as hosts:
        first, second = (hosts.url_address(name) for name in hosts.names)
        addresses = f"import os; os.environ.update(FIRST={first!r}, SECOND={second!r})"
        before = [(rank, addresses) for rank in range(4)]
        with Ranks(hosts, ["hosta", "hostb", "hosta", "hostb"], JOBS, before, wait=True) as ranks:
            said = [ranks.line(rank) for rank in range(4)]
    assert [one["mine"] for one in said] == [None, None, [7.0, ""], [7.0, ""]]
    assert said[0]["near"] == said[2]["near"] == [4.0, ""]
    for rank in (0, 3):
        kind, text = said[rank]["far"]
        assert kind == "TransportError" and "are not in one MPI job" in text and "be on one host" in text, text
