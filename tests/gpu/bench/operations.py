"""The other operations by 4 ranks, beside gloo where it has a CUDA path (its send and recv have none)."""

from .session import Session, microseconds

SIZES = (64 << 10, 4 << 20, 64 << 20)
NAMES = (
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "all_to_all",
    "reduce",
    "gather",
    "scatter",
    "all_reduce_async",
    "send_recv",
)


def main():
    session = Session(__doc__)
    with session.pool(4) as pool:
        print(
            f"4 ranks, float32, microseconds: one call and its end | in a row, per call\n{'operation':<17} "
            f"{'bytes':>10} {'custom':>11} "
            f"{'row':>10} {'gloo':>11} {'row':>10} {'gloo/custom':>12} {'#wrong':>7}"
        )
        for nbytes in (s for s in SIZES if s <= session.largest):
            for name in NAMES:
                wrong = pool.check(name, nbytes)
                timed = pool.time(name, nbytes, ("custom",) if name == "send_recv" else ("custom", "gloo"))
                if timed is None:
                    continue
                ours, gloo = timed["custom"], timed.get("gloo", "refused")
                told = "" if isinstance(gloo, str) or isinstance(ours, str) else f"{gloo.single / ours.single:.2f}"
                print(
                    f"{name:<17} {nbytes:>10} {microseconds(ours)} {microseconds(gloo)} {told:>12} {wrong:>7}",
                    flush=True,
                )
                for backend, found in timed.items():
                    session.add(
                        operation=name,
                        ranks=4,
                        bytes=nbytes,
                        backend=backend,
                        **({"refused": found} if isinstance(found, str) else found.as_json()),
                    )
                if wrong or isinstance(ours, str):
                    session.fail(
                        f"{name}, {nbytes} bytes: " + (ours if isinstance(ours, str) else f"{wrong} wrong elements")
                    )
    session.finish()


if __name__ == "__main__":
    main()
