"""all_reduce of 4 B to 256 MB by 2, 4 and 8 ranks: "custom" beside gloo's CUDA path, NCCL where it can, and the floor.

The floor for N ranks that share a GPU whose memory moves B bytes a second is 2 N S / B: each rank reads S bytes and
writes S. B is measured in the same run, by copies of one rank alone; data that fits the GPU's cache may beat it.
gloo's figures are of calls in turns with ours, NCCL's come after all others.
"""

import torch

from . import ranks
from .session import Session, microseconds

SIZES = (4, 1 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20)
COPY = 256 << 20
GLOO_S_MOST = 64 << 20  # larger ones take it seconds


def head(size, names, rate, said):
    print(
        f"\nall_reduce, {size} ranks, float32, microseconds: one call and its end | in a row, per call. "
        f"B = {rate / 1e9:.0f} GB/s; {said}"
    )
    print(
        f"{'bytes':>10} {'custom':>11} {'row':>10} {'p90':>9} {'floor':>9} {'row/floor':>10} {'#wrong':>7}"
        + "".join(f" {name:>11} {'row':>10} {'/custom':>8}" for name in names)
    )


def row(nbytes, timed, floor, wrong):
    """Asked for when ours was not refused."""
    ours, *rest = timed.values()
    text = f"{nbytes:>10} {microseconds(ours)} {ours.worst * 1e6:>9.1f} {floor * 1e6:>9.1f}"
    text += f" {ours.row / floor:>10.2f} {wrong:>7}"
    for other in rest:
        ratio = "" if isinstance(other, str) else f"{other.single / ours.single:.2f}"
        text += f" {microseconds(other)} {ratio:>8}"
    print(text, flush=True)


def ours_beside_gloo(session, size, gpus):
    with session.pool(size) as pool:
        pool.check("all_reduce", 4)  # the first call chooses how
        rate = pool.run(ranks.copy_rate, session.device, min(COPY, session.largest))[0]
        head(size, ("gloo",), rate, pool.run(ranks.said)[0])
        for nbytes in sorted((s for s in SIZES if s <= session.largest), key=lambda s: (s not in (1 << 20, COPY), s)):
            wrong = pool.check("all_reduce", nbytes)
            timed = pool.time("all_reduce", nbytes, ("custom", "gloo") if nbytes <= GLOO_S_MOST else ("custom",))
            if timed is None:
                continue
            floor = 2 * -(-size // gpus) * nbytes / rate
            session.keep(size, nbytes, timed, floor_us=floor * 1e6, copy_rate=rate)
            if isinstance(timed["custom"], str):
                session.fail(f"{size} ranks, {nbytes} bytes: {timed['custom']}")
            else:
                row(nbytes, timed, floor, wrong)
            if wrong:
                session.fail(f"{size} ranks, {nbytes} bytes: {wrong} wrong elements")


def main():
    session = Session(__doc__.splitlines()[0])
    gpus = torch.cuda.device_count() if session.device == "cuda" else 1
    sizes = [size for size in (4, 2, 8) if session.wants(size)]  # what is asked for first
    for size in sizes:
        ours_beside_gloo(session, size, gpus)
    for size in sizes:
        session.nccl(size, SIZES)
    session.finish()


if __name__ == "__main__":
    main()
