"""Uneven collectives whose parts do not fit: what one rank gives is not what another expects. Every rank is told, with
the sizes of all; nothing is written; and where they do fit, everyone gets what it is to get.

Cases are made up at random, alike on all ranks from their number. Over hosts: pytest --job 2+2 FILE; 2,000 cases with
--full."""

import random
import time
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions

from c10d_custom.errors import CollectiveMismatchError
from c10d_custom.transport.hosts import algorithm

from .operations import Arena
from .test_disagreement import outcome

FEW_INSIDE, FEW, MANY, AT_ONCE = 30, 150, 2000, 50  # cases: inside a host, over hosts
DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.int64]
MOST = [0, 3, 9, 9, 200, 200, 2_000, 40_000]  # elements of a part
SEED = 20_000


KINDS = ["all_gather", "all_gather_coalesced", "reduce_scatter", "all_to_all", "all_to_all_single", "gather", "scatter"]
GATHERS, AT_THE_ROOT = ("all_gather", "gather"), ("gather", "scatter")


@dataclass
class Case:
    """``gives``, ``gets``: [rank][other], elements of the parts as the rank says."""

    kind: str
    dtype: torch.dtype
    root: int
    asynchronous: bool
    late: int  # the rank that comes last
    many_ranks: bool  # over hosts: as in a group too large for messages from each rank to each
    gives: list
    gets: list

    @property
    def name(self):
        return {"all_gather_coalesced": "all_gather", "all_to_all_single": "all_to_all"}.get(self.kind, self.kind)

    def moves(self, giver, taker):
        return {"gather": taker, "scatter": giver}.get(self.kind, self.root) == self.root

    def unfit(self):
        ranks = range(len(self.gives))
        return [(a, b) for a in ranks for b in ranks if self.moves(a, b) and self.gives[a][b] != self.gets[b][a]]


def sized(rng, most):
    return rng.choice([0, 1, most, rng.randint(0, most), rng.randint(0, most)])


def otherwise(rng, size):
    """Another size: by one and by much, nothing, something."""
    other = rng.choice([size + 1, size - 1, 2 * size, size + 1000, size // 2, 0, 30_000])
    return other if other >= 0 and other != size else size + 1


def fitting(rng, n):
    kind, most = rng.choice(KINDS), rng.choice(MOST)
    dtype, root, late = rng.choice(DTYPES), rng.randrange(n), rng.randrange(n)
    case = Case(kind, dtype, root, rng.random() < 0.3, late, rng.random() < 0.4, [], [])
    row = [sized(rng, most) for _ in range(n)]
    if case.name in GATHERS:
        case.gives = [[row[r]] * n for r in range(n)]
    elif case.name != "all_to_all":
        case.gives = [row[:] for _ in range(n)]
    else:
        case.gives = [[sized(rng, most) for _ in range(n)] for _ in range(n)]
    case.gets = [[case.gives[a][b] for a in range(n)] for b in range(n)]
    return case


def spoil(rng, case, n):
    """Some ranks say otherwise, as far as a rank's own arguments go together."""
    for rank in rng.sample(range(n), rng.choice([1, 1, 1, 2, n])):
        gives, gets = case.gives[rank], case.gets[rank]
        for other in rng.sample(range(n), rng.choice([1, 1, 2, n])):
            if case.name == "all_to_all":
                sides = [gives, gets] if other == rank else [rng.choice([gives, gets])]
                size = otherwise(rng, sides[0][other])
                for side in sides:
                    side[other] = size
                continue
            each, single = (gets, gives) if case.name in GATHERS else (gives, gets)
            size, listed = otherwise(rng, each[other]), case.name not in AT_THE_ROOT or rank == case.root
            if listed:
                each[other] = size
            if other == rank or not listed:
                single[:] = [size] * n


def made_up(number, n):
    """(a case whose parts fit, the same spoiled)"""
    rng = random.Random(SEED + number)
    while True:
        well = fitting(rng, n)
        bad = deepcopy(well)
        spoil(rng, bad, n)
        if bad.unfit():
            return well, bad


def call(group, case, arena, fill=None):
    """Calls it; ``fill``: what to fill the inputs with. (Work or None, the parts of the output)"""
    rank, form, dtype = group.rank(), case.kind, case.dtype
    gives, gets = case.gives[rank], case.gets[rank]
    if case.name in GATHERS:
        gives = gives[rank : rank + 1]
    elif case.name != "all_to_all":
        gets = gets[rank : rank + 1]
    if case.name in AT_THE_ROOT and rank != case.root:
        gives, gets = (gives, []) if form == "gather" else ([], gets)
    if form == "all_to_all_single":
        whole_in, whole_out = (arena.tensor(sum(sizes), dtype) for sizes in (gives, gets))
        ins, outs = whole_in.split(gives), whole_out.split(gets)
    else:
        ins, outs = ([arena.tensor(size, dtype) for size in sizes] for sizes in (gives, gets))
    for part in ins:
        if fill is not None:
            part.fill_(fill)
    asked = dict(group=group, async_op=case.asynchronous)
    if form == "all_gather":
        work = dist.all_gather(outs, ins[0], **asked)
    elif form == "all_gather_coalesced":
        options = AllgatherOptions()
        options.asyncOp = case.asynchronous
        work = group.allgather_coalesced([[part] for part in outs], [ins[0]], options)
    elif form == "reduce_scatter":
        work = dist.reduce_scatter(outs[0], ins, **asked)
    elif form == "all_to_all":
        work = dist.all_to_all(outs, ins, **asked)
    elif form == "all_to_all_single":
        work = dist.all_to_all_single(whole_out, whole_in, gets, gives, **asked)
    elif form == "gather":
        work = dist.gather(ins[0], outs or None, group_dst=case.root, **asked)
    else:
        work = dist.scatter(outs[0], ins or None, group_src=case.root, **asked)
    return work, outs


@contextmanager
def as_if_of_many_ranks(wanted):
    most = algorithm.MOST_RANKS
    algorithm.MOST_RANKS = 1 if wanted else most
    try:
        yield
    finally:
        algorithm.MOST_RANKS = most


def line(case, rank):
    """What the table says of a rank, but for the number of the call."""
    gives, gets = case.gives[rank], case.gets[rank]
    each, single = (gets, gives) if case.name in GATHERS else (gives, gets)
    rooted = case.name in AT_THE_ROOT
    even = case.name != "all_to_all" and ({*each} == {single[rank]} or rooted and rank != case.root)
    text = f" {str(case.dtype)[6:]}[{single[rank] if even else 'uneven'}]{f' root {case.root}' * rooted}"
    if even:
        return text
    giving, getting = (", ".join(map(str, sizes)) for sizes in (gives, gets))
    said = {
        "all_gather": f"gives {gives[rank]}, gets {getting}",
        "all_to_all": f"gives {giving}, gets {getting}",
        "gather": f"gets {getting}",
    }
    return f"{text}: {said.get(case.name, f'gives {giving}')}"


def told(case, n, text):
    """What the error does not say."""
    wrong = [] if "\nNothing was moved." in text else ["Nothing was moved"]
    lines = [line(case, r) for r in range(n)]
    for r in range(n):
        of_rank = [known for known in text.split("\n") if known.startswith(f"  rank {r}: {case.name} #")]
        if not of_rank or not of_rank[0].endswith(lines[r]):
            wrong.append(f"rank {r}: ...{lines[r]}")
    if all("[uneven]" in known for known in lines):  # else they differ in the count
        a, b = case.unfit()[0]
        wrong += [
            piece
            for piece in (
                "they differ in the sizes of their parts (",
                f"rank {a} gives rank {b} {case.gives[a][b]}, which expects {case.gets[b][a]}",
            )
            if piece not in text.partition("\n")[0]
        ]
    return [f"{missing!r} not in: {text}" for missing in wrong]


def expected(case, rank, n):
    """The value of each part of the output."""
    if case.kind == "reduce_scatter":
        return [n * (n + 1) // 2]
    if case.kind == "scatter":
        return [case.root + 1]
    return [r + 1 for r in range(n)]


def one(number, n):
    well, bad = made_up(number, n)
    with as_if_of_many_ranks(bad.many_ranks):
        group = dist.new_group()
    rank, wrong = group.rank(), []
    if number % 3 == 0:
        work, outs = call(group, well, Arena(), fill=rank + 1)
        if work is not None:
            work.wait()
        values = expected(well, rank, n)
        wrong += [f"{v} is not all of {o}" for v, o in zip(values, outs) if (o != v).any()]
    if rank == bad.late and number % 2:
        time.sleep(0.02)
    arena = Arena()
    error, _, problem = outcome(lambda: call(group, bad, arena)[0], CollectiveMismatchError)
    wrong += [problem] if problem else told(bad, n, str(error))
    wrong += [f"written: {found}" for found in arena.written()]
    dist.destroy_process_group(group)
    return [f"case {number}, rank {rank}, {bad}: {what}" for what in wrong]


def several(numbers):
    return [what for number in numbers for what in one(number, dist.get_world_size())]


def check(ranks, cases):
    for first in range(0, cases, AT_ONCE):
        found = ranks.run(several, range(first, min(cases, first + AT_ONCE)), timeout=120)
        assert not any(found), "\n".join(what for of_rank in found for what in of_rank)[:5000]


@pytest.mark.world_sizes(4)
@pytest.mark.timeout(3600)
def test_every_rank_is_told_and_nothing_is_written(ranks, full):
    check(ranks, MANY if full else FEW if ranks.layout else FEW_INSIDE)
