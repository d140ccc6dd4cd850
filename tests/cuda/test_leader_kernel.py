"""What the leader's kernel computes for N ranks, with the kernel compiled for the host and the ranks' tensors at any
alignment, against a reference that knows nothing of jobs."""

import random
from types import SimpleNamespace

import pytest
import torch

from c10d_custom import dtypes
from c10d_custom.call import Op
from c10d_custom.transport.cuda import in_place, kernels
from c10d_custom.transport.cuda.host_exchange import BYTES
from engine import engine, same
from host_kernels import PAIRS, HostKernels, distinct
from test_reduce_kernels import Place

pytestmark = pytest.mark.lane2

COUNTS = [0, 1, 3, 17, 255, 1000]


class Ranks:
    """A place for each tensor of each rank. Of each rank the same remainders, or any."""

    def __init__(self, rng, item):
        self.rng, self.item, self.all = rng, item, []
        self._common = rng.choice([None, rng.randrange(0, 16, item)])

    def place(self, data):
        place = Place(len(data), self.rng.randrange(16) if self._common is None else self._common)
        place.bytes.copy_(data)
        self.all.append(place)
        return place


def random_bytes(rng, nbytes):
    return torch.frombuffer(bytearray(rng.randbytes(nbytes + 1)), dtype=torch.uint8)[:nbytes]


def leads(device, op, dtype, redop, factors, inputs, outputs, root=-1):
    """The leader, rank 0, does it. ``inputs[rank]``, ``outputs[rank]``: places."""
    mine = [[SimpleNamespace(nbytes=p.bytes.nbytes) for p in side[0]] for side in (inputs, outputs)]
    call = SimpleNamespace(op=op, dtype=dtype, inputs=mine[0], outputs=mine[1], root=root)
    at = [[p.address for p in [*i, *o]] for i, o in zip(inputs, outputs)]
    jobs = in_place.jobs_of(call, at)
    if op in (Op.all_reduce, Op.reduce_scatter):
        device.reduce(0, dtype, redop, factors, jobs)
    else:
        device.reduce(0, BYTES, in_place.COPY, [], jobs)


@pytest.mark.parametrize("size", [2, 3, 8, 16])
@pytest.mark.parametrize("op", [Op.all_reduce, Op.reduce_scatter])
def test_reductions(library, op, size):
    rng = random.Random(100 * size + op)
    for dtype, redop in distinct(library, PAIRS)[:: 1 if size < 4 else 5]:
        device = HostKernels(library, processors=rng.choice([1, 5]))
        ranks, item = Ranks(rng, dtype.item_bytes), dtype.item_bytes
        factors = [rng.choice([0.3, -1.5, 2.0]) for _ in range(size)] if redop == kernels.PREMUL_SUM else []
        parts = 1 if op is Op.all_reduce else size
        counts = [rng.choice(COUNTS) for _ in range(parts)]
        data = [[random_bytes(rng, c * item) for c in counts] for _ in range(size)]
        inputs = [[ranks.place(d) for d in of_rank] for of_rank in data]
        mine = [0 if op is Op.all_reduce else r for r in range(size)]
        outputs = [
            [inputs[r][mine[r]] if rng.random() < 0.5 else ranks.place(random_bytes(rng, counts[mine[r]] * item))]
            for r in range(size)
        ]
        leads(device, op, dtype, redop, factors, inputs, outputs)
        for r in range(size):
            if counts[mine[r]]:
                want = engine(dtype, redop, [d[mine[r]] for d in data], counts[mine[r]], factors)
                problem = same(dtype, redop, outputs[r][0].bytes, want)
                assert problem is None, (dtype.name, dtypes.REDUCE_OPS[redop], r, counts, problem)
        assert all(p.untouched() for p in ranks.all)


@pytest.mark.parametrize("size", [2, 3, 8, 16])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float16, torch.float32, torch.complex128], ids=str)
def test_what_only_moves(library, dtype, size):
    rng, dtype = random.Random(size), dtypes.BY_DTYPE[dtype]
    device = HostKernels(library, processors=2)
    for _ in range(6):
        ranks, item = Ranks(rng, dtype.item_bytes), dtype.item_bytes
        counts = [rng.choice(COUNTS) for _ in range(size)]
        data = [random_bytes(rng, c * item) for c in counts]
        outputs = [[ranks.place(random_bytes(rng, len(d))) for d in data] for _ in range(size)]
        inputs = [[outputs[r][r] if rng.random() < 0.5 else ranks.place(d)] for r, d in enumerate(data)]
        for (place,), d in zip(inputs, data):
            place.bytes.copy_(d)
        leads(device, Op.all_gather, dtype, 0, [], inputs, outputs)
        assert all(torch.equal(place.bytes, d) for of_rank in outputs for place, d in zip(of_rank, data))
        root, sent = rng.randrange(size), max(data, key=len)
        there = [ranks.place(sent if r == root else random_bytes(rng, len(sent))) for r in range(size)]
        leads(
            device,
            Op.broadcast,
            dtype,
            0,
            [],
            [[t] if r == root else [] for r, t in enumerate(there)],
            [[] if r == root else [t] for r, t in enumerate(there)],
            root,
        )
        assert all(torch.equal(t.bytes, sent) for t in there)
        assert all(p.untouched() for p in ranks.all)
