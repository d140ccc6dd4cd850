"""The object collectives: two tensors each, of lengths that only the data decides."""

import pytest
import torch.distributed as dist

from .cases import check
from .cases import group as make_group


def _object(rank, index=0):
    """Unlike kinds and sizes: a dict, None, a megabyte, a text."""
    kinds = [{"rank": rank, "list": list(range(rank))}, None, bytes([rank % 256]) * (1 << 20), "text" * (index + 1)]
    return (rank, kinds[(rank + index) % len(kinds)])


def _objects(members):
    g = make_group(members)
    if g.me is None:
        return []
    wrong = []

    def expect(what, got, want):
        if got != want:
            wrong.append(f"{what}: {str(got)[:200]} instead of {str(want)[:200]}")

    everyone = [_object(rank) for rank in g.ranks]
    got = [None] * g.size
    dist.all_gather_object(got, everyone[g.me], group=g.pg)
    expect("all_gather_object", got, everyone)
    for root in range(g.size):
        got = [None] * g.size if g.me == root else None
        dist.gather_object(everyone[g.me], got, g.ranks[root], g.pg)
        expect(f"gather_object to {root}", got, everyone if g.me == root else None)

        want = [_object(g.ranks[root], i) for i in range(3)]
        got = list(want) if g.me == root else [None] * 3
        dist.broadcast_object_list(got, g.ranks[root], g.pg)
        expect(f"broadcast_object_list from {root}", got, want)

        mine = [None]
        dist.scatter_object_list(mine, everyone if g.me == root else None, g.ranks[root], g.pg)
        expect(f"scatter_object_list from {root}", mine, [everyone[g.me]])

    want = [_object(g.ranks[g.me // 2 * 2], i) for i in range(3)]
    if g.me % 2:
        got = [None] * 3
        source = dist.recv_object_list(got, g.ranks[g.me - 1], g.pg)
        expect("recv_object_list", (source, got), (g.ranks[g.me - 1], want))
    elif g.me + 1 < g.size:
        dist.send_object_list(want, group=g.pg, group_dst=g.me + 1)
    return wrong


@pytest.mark.parametrize("members", ["world", "unsorted"])
def test_objects(ranks, members):
    check(ranks, _objects, members)
