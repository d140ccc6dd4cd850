"""all_reduce of 4 B to 256 MB by 2, 4 and 8 ranks: "custom" beside gloo's CUDA path, and the floor.

The floor for N ranks that share one GPU whose memory moves B bytes a second is 2 N S / B: each rank reads S bytes and
writes S. B is measured in the same run, by copies of one rank alone; data that fits the GPU's cache may beat it.
"""
from . import ranks
from .session import Session, microseconds

SIZES = (4, 1 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20)
COPY = 256 << 20


def main():
    session = Session(__doc__.splitlines()[0])
    for size in (4, 2, 8):  # what is asked for first
        if not session.wants(size):
            continue
        with session.pool(size) as pool:
            pool.check("all_reduce", 4)  # the first call chooses how
            rate = pool.run(ranks.copy_rate, session.device, min(COPY, session.largest))[0]
            print(f"\nall_reduce, {size} ranks, float32, microseconds: one call and its end | in a row, per call. "
                  f"B = {rate / 1e9:.0f} GB/s; {pool.run(ranks.said)[0]}")
            print(f"{'bytes':>10} {'custom':>11} {'row':>10} {'p90':>9} {'gloo':>11} {'row':>10} {'gloo/custom':>12} {'floor':>9} {'row/floor':>10} {'#wrong':>7}")
            for nbytes in sorted((s for s in SIZES if s <= session.largest), key=lambda s: (s not in (1 << 20, COPY), s)):
                wrong = pool.check("all_reduce", nbytes)
                timed = pool.time("all_reduce", nbytes, ("custom", "gloo"))
                if timed is None:
                    continue
                floor = 2 * size * nbytes / rate
                ours, gloo = timed["custom"], timed["gloo"]
                told = "" if isinstance(gloo, str) or isinstance(ours, str) else f"{gloo.single / ours.single:.2f}"
                share = "" if isinstance(ours, str) else f"{ours.row / floor:.2f}"
                p90 = "" if isinstance(ours, str) else f"{ours.worst * 1e6:.1f}"
                print(f"{nbytes:>10} {microseconds(ours)} {p90:>9} {microseconds(gloo)} {told:>12} {floor * 1e6:>9.1f} {share:>10} {wrong:>7}", flush=True)
                for name, found in timed.items():
                    session.add(operation="all_reduce", ranks=size, bytes=nbytes, backend=name, floor_us=floor * 1e6, copy_rate=rate,
                                **({"refused": found} if isinstance(found, str) else found.as_json()))
                if wrong or isinstance(ours, str):
                    session.fail(f"{size} ranks, {nbytes} bytes: " + (ours if isinstance(ours, str) else f"{wrong} wrong elements"))
    session.finish()


if __name__ == "__main__":
    main()
