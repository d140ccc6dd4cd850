"""Every collective in shared mode under a simulated GPU, against a reference that knows nothing of ranks'
staging memory; and what the simulation must notice when the protocol is broken."""

import random

import pytest
import torch
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

from conformance.reference import reduce_in_order
from conformance.values import raw, same_bytes
from thread_ranks import SMALL, run_ranks

pytestmark = pytest.mark.lane2

HALF = SMALL["cuda_staging_bytes"] // 2
SHARED = {"cuda_mode": "shared"}


def values(dtype, rank, step, count):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    if dtype.is_floating_point:
        return torch.randn(count, generator=generator, dtype=torch.float32).mul(3).to(dtype)
    return torch.randint(-100, 100, (count,), generator=generator).to(dtype)


def sizes_for(rng, item):
    edge = HALF // item
    return rng.choice([0, 1, 3, 100, 1023, 1024, 1025, edge - 1, edge, edge + 1, 2 * edge + 77, 3 * edge])


class Program:
    """A random sequence of collectives, the same on all ranks, each checked by bits."""

    def __init__(self, seed, size, steps):
        self.rng, self.size, self.steps = random.Random(seed), size, steps
        self.expected = []

    def run(self, r):
        seen, works = [], []
        rng = random.Random(repr(self.plan))
        for step, (kind, dtype, op, count, root, asynchronous, extra) in enumerate(self.plan):
            outputs, wanted, work = getattr(self, kind)(r, step, dtype, op, count, root, asynchronous, extra)
            works.append((work, step))
            if not asynchronous or rng.random() < 0.5:
                for w, _ in works:
                    w.wait()
                works = []
            seen.append((kind, step, outputs, wanted, []))
        for w, _ in works:
            w.wait()
        for _, _, outputs, _, got in seen:
            for t in outputs:
                r.read(t, got)
        r.synchronize()
        for kind, step, _, wanted, got in seen:
            for have, want in zip(got, wanted, strict=True):
                assert same_bytes(raw(have), raw(want)), (
                    f"step {step}, {kind} {self.plan[step]}: rank {r.rank} of {self.size} has a wrong result"
                )

    @classmethod
    def of(cls, seed, size, steps):
        p = cls(seed, size, steps)
        kinds = [
            "all_reduce",
            "all_reduce",
            "reduce",
            "broadcast",
            "all_gather",
            "all_gather_uneven",
            "reduce_scatter",
            "reduce_scatter_uneven",
            "all_to_all",
            "gather",
            "scatter",
        ]
        p.plan = []
        for _ in range(steps):
            dtype = p.rng.choice([torch.float32, torch.bfloat16, torch.int64, torch.float16])
            op = p.rng.choice(["SUM", "AVG", "MAX", "PRODUCT"] + (["PREMUL_SUM"] if dtype.is_floating_point else []))
            p.plan.append(
                (
                    p.rng.choice(kinds),
                    dtype,
                    op,
                    sizes_for(p.rng, dtype.itemsize),
                    p.rng.randrange(size),
                    p.rng.random() < 0.5,
                    p.rng.randrange(1 << 30),
                )
            )
        return p

    # Each: (outputs, what they must become, work)

    def _op(self, op, rank):
        return torch.distributed._make_nccl_premul_sum(0.5 + rank) if op == "PREMUL_SUM" else getattr(ReduceOp, op)

    def _reduced(self, dtype, op, step, count):
        inputs = [values(dtype, r, step, count) for r in range(self.size)]
        return reduce_in_order(inputs, op, [0.5 + r for r in range(self.size)])

    def _options(self, kind, asynchronous, **fields):
        options = kind()
        options.asyncOp = asynchronous
        for name, value in fields.items():
            setattr(options, name, value)
        return options

    def _device(self, r, contents):
        t = torch.empty_like(contents)
        r.fill(t, contents)
        return t

    def all_reduce(self, r, step, dtype, op, count, root, asynchronous, extra):
        t = self._device(r, values(dtype, r.rank, step, count))
        o = self._options(AllreduceOptions, asynchronous, reduceOp=self._op(op, r.rank))
        return [t], [self._reduced(dtype, op, step, count)], r.pg.allreduce([t], o)

    def reduce(self, r, step, dtype, op, count, root, asynchronous, extra):
        mine = values(dtype, r.rank, step, count)
        t = self._device(r, mine)
        o = self._options(ReduceOptions, asynchronous, reduceOp=self._op(op, r.rank), rootRank=root)
        wanted = self._reduced(dtype, op, step, count) if r.rank == root else mine
        return [t], [wanted], r.pg.reduce([t], o)

    def broadcast(self, r, step, dtype, op, count, root, asynchronous, extra):
        t = self._device(r, values(dtype, r.rank, step, count))
        o = self._options(BroadcastOptions, asynchronous, rootRank=root)
        return [t], [values(dtype, root, step, count)], r.pg.broadcast([t], o)

    def all_gather(self, r, step, dtype, op, count, root, asynchronous, extra, counts=None):
        counts = counts or [count] * self.size
        t = self._device(r, values(dtype, r.rank, step, counts[r.rank]))
        outputs = [self._device(r, torch.zeros(c, dtype=dtype)) for c in counts]
        o = self._options(AllgatherOptions, asynchronous)
        return outputs, [values(dtype, q, step, c) for q, c in enumerate(counts)], r.pg.allgather([outputs], [t], o)

    def all_gather_uneven(self, r, step, dtype, op, count, root, asynchronous, extra):
        rng = random.Random(extra)
        counts = [sizes_for(rng, dtype.itemsize) for _ in range(self.size)]
        return self.all_gather(r, step, dtype, op, count, root, asynchronous, extra, counts)

    def reduce_scatter(self, r, step, dtype, op, count, root, asynchronous, extra, counts=None):
        counts = counts or [count] * self.size
        starts = [sum(counts[:q]) for q in range(self.size + 1)]
        mine = values(dtype, r.rank, step, starts[-1])
        inputs = [self._device(r, mine[a:b].clone()) for a, b in zip(starts, starts[1:])]
        output = self._device(r, torch.zeros(counts[r.rank], dtype=dtype))
        o = self._options(ReduceScatterOptions, asynchronous, reduceOp=self._op(op, r.rank))
        whole = self._reduced(dtype, op, step, starts[-1])
        return (
            [output],
            [whole[starts[r.rank] : starts[r.rank + 1]].clone()],
            r.pg.reduce_scatter([output], [inputs], o),
        )

    def reduce_scatter_uneven(self, r, step, dtype, op, count, root, asynchronous, extra):
        rng = random.Random(extra)
        counts = [sizes_for(rng, dtype.itemsize) for _ in range(self.size)]
        return self.reduce_scatter(r, step, dtype, op, count, root, asynchronous, extra, counts)

    def all_to_all(self, r, step, dtype, op, count, root, asynchronous, extra):
        rng = random.Random(extra)
        counts = [[sizes_for(rng, dtype.itemsize) for _ in range(self.size)] for _ in range(self.size)]

        def part(source, target):
            return values(dtype, 100 * source + target, step, counts[source][target])

        inputs = [self._device(r, part(r.rank, q)) for q in range(self.size)]
        outputs = [self._device(r, torch.zeros(counts[q][r.rank], dtype=dtype)) for q in range(self.size)]
        o = self._options(AllToAllOptions, asynchronous)
        return outputs, [part(q, r.rank) for q in range(self.size)], r.pg.alltoall(outputs, inputs, o)

    def gather(self, r, step, dtype, op, count, root, asynchronous, extra):
        t = self._device(r, values(dtype, r.rank, step, count))
        at_root = r.rank == root
        outputs = [self._device(r, torch.zeros(count, dtype=dtype)) for _ in range(self.size)] if at_root else []
        o = self._options(GatherOptions, asynchronous, rootRank=root)
        wanted = [values(dtype, q, step, count) for q in range(self.size)] if at_root else []
        return outputs, wanted, r.pg.gather([outputs] if at_root else [], [t], o)

    def scatter(self, r, step, dtype, op, count, root, asynchronous, extra):
        output = self._device(r, torch.zeros(count, dtype=dtype))
        inputs = [[self._device(r, values(dtype, q, step, count)) for q in range(self.size)]] if r.rank == root else []
        o = self._options(ScatterOptions, asynchronous, rootRank=root)
        return [output], [values(dtype, r.rank, step, count)], r.pg.scatter([output], inputs, o)


def program(seed, size, steps, config, **options):
    p = Program.of(seed, size, steps)
    run_ranks(size, p.run, seed=seed, config=config, **options)


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("size", range(1, 9))
def test_every_collective_under_many_schedules(size, full):
    for seed in range((300 if size < 5 else 100) if full else (4 if size < 5 else 1)):
        program(100 * size + seed, size, 10, SHARED)


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_the_same_staged(size, full):
    for seed in range((200 if size < 5 else 50) if full else (3 if size < 5 else 1)):
        program(2000 * size + seed, size, 10, {"cuda_mode": "staged"})


@pytest.mark.parametrize("one_shot", [0, 1 << 30])
def test_each_form_of_all_reduce_alone(one_shot):
    """Where ranks have GPUs of their own."""
    for seed in range(4):
        program(3000 + seed, 3, 10, {**SHARED, "cuda_one_shot_bytes": one_shot}, gpus=list("ABC"))
