"""Which dtype works with which operation on a backend: tries every combination with 2 ranks and
prints JSON. docs/support.md shows the answers for gloo beside ours (see doc_tables.py).

    python scripts/measure_support.py --backend gloo --out tests/gloo_support.json
"""

import argparse
import json
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import ReduceOp

from c10d_custom import dtypes

REDUCE_OPS = ["SUM", "PRODUCT", "MIN", "MAX", "AVG", "BAND", "BOR", "BXOR", "PREMUL_SUM"]
COUNT = 8


def ones(dtype, count=COUNT):
    return torch.full((count,), 1.0).to(dtype)


def same(tensor, value):
    return bool((tensor.to(torch.complex128) == value).all())


def measurable(dtype):
    """Whether torch makes ones of it and reads them."""
    try:
        return same(ones(dtype), 1)
    except RuntimeError:  # NotImplementedError is one
        return False


def reduce_op(name):
    return dist._make_nccl_premul_sum(2.0) if name == "PREMUL_SUM" else getattr(ReduceOp, name)


def reduced(name, dtype):
    """What two ones reduce to."""
    if name == "SUM":
        return 1 if dtype is torch.bool else 2
    return {"PREMUL_SUM": 4, "BXOR": 0}.get(name, 1)


def tries(rank, dtype, pg):
    """{operation: a function that runs it and says whether the result is right}."""
    other = 1 - rank

    def all_reduce(name):
        def run():
            t = ones(dtype)
            # The group's own method: dist.all_reduce turns complex tensors into pairs of reals.
            opts = dist.AllreduceOptions()
            opts.reduceOp = reduce_op(name)
            pg.allreduce([t], opts).wait()
            return same(t, reduced(name, dtype))

        return run

    def moved(call, *outputs):
        call()
        return all(same(o, 1) for o in outputs)

    def zeros(n=COUNT):
        return torch.zeros(n).to(dtype)

    def broadcast():
        t = ones(dtype) if rank == 0 else zeros()
        return moved(lambda: dist.broadcast(t, 0), t)

    def all_gather():
        outs = [zeros(), zeros()]
        return moved(lambda: dist.all_gather(outs, ones(dtype)), *outs)

    def all_gather_into_tensor():
        out = zeros(2 * COUNT)
        return moved(lambda: dist.all_gather_into_tensor(out, ones(dtype)), out)

    def gather():
        outs = [zeros(), zeros()] if rank == 0 else None
        return moved(lambda: dist.gather(ones(dtype), outs, 0), *(outs or []))

    def scatter():
        out = zeros()
        return moved(lambda: dist.scatter(out, [ones(dtype)] * 2 if rank == 0 else None, 0), out)

    def all_to_all():
        outs = [zeros(), zeros()]
        return moved(lambda: dist.all_to_all(outs, [ones(dtype)] * 2), *outs)

    def all_to_all_single():
        out = zeros(2 * COUNT)
        return moved(lambda: dist.all_to_all_single(out, ones(dtype, 2 * COUNT)), out)

    def send_recv():
        out = zeros()
        request = dist.isend(ones(dtype), other)
        return moved(lambda: (dist.recv(out, other), request.wait()), out)

    def reduce():
        t = ones(dtype)
        opts = dist.ReduceOptions()
        opts.reduceOp, opts.rootRank = ReduceOp.SUM, 0
        pg.reduce([t], opts).wait()
        return rank != 0 or same(t, reduced("SUM", dtype))

    def reduce_scatter():
        out = zeros()
        opts = dist.ReduceScatterOptions()
        opts.reduceOp = ReduceOp.SUM
        pg.reduce_scatter([out], [[ones(dtype), ones(dtype)]], opts).wait()
        return same(out, reduced("SUM", dtype))

    found = {f"all_reduce {name}": all_reduce(name) for name in REDUCE_OPS}
    found |= {
        f.__name__: f
        for f in (
            reduce,
            reduce_scatter,
            broadcast,
            all_gather,
            all_gather_into_tensor,
            gather,
            scatter,
            all_to_all,
            all_to_all_single,
            send_recv,
        )
    }
    return found


def work(rank, backend, port, out):
    dist.init_process_group(
        backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2, timeout=timedelta(seconds=20)
    )
    store = dist.distributed_c10d._get_default_store()
    pg = dist.group.WORLD
    results = {}
    for dtype in filter(measurable, dtypes.BY_DTYPE):
        name = dtypes.BY_DTYPE[dtype].name
        for operation, run in tries(rank, dtype, pg).items():
            try:
                right = run()
            except Exception:
                right = False
            key = f"support/{operation}/{name}/"
            store.set(key + str(rank), str(int(right)))
            results.setdefault(operation, {})[name] = right and store.get(key + str(1 - rank)) == b"1"
    if rank == 0:
        with open(out, "w") as file:
            json.dump({"backend": backend, "torch": torch.__version__, "supports": results}, file, indent=1)
            file.write("\n")
    dist.barrier()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", required=True)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    from torch.distributed.elastic.utils.distributed import get_free_port

    mp.spawn(work, (args.backend, get_free_port(), args.out), nprocs=2)
