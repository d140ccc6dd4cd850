"""The other operations by 4 ranks, beside gloo where it has a CUDA path (its send and recv have none), and NCCL where
it can."""

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
    others = session.others(4)
    with session.pool(4) as pool:
        print(
            f"4 ranks, float32, microseconds: one call and its end | in a row, per call\n{'operation':<17} "
            f"{'bytes':>10} {'#wrong':>7} {'custom':>11} {'row':>10}"
            + "".join(f" {name:>11} {'row':>10} {'/custom':>8}" for name in others)
        )
        for nbytes in (s for s in SIZES if s <= session.largest):
            for name in NAMES:
                wrong = pool.check(name, nbytes)
                able = [other for other in others if (name, other) != ("send_recv", "gloo")]
                timed = pool.time(name, nbytes, ("custom", *able))
                if timed is None:
                    continue
                ours, line = timed["custom"], f"{name:<17} {nbytes:>10} {wrong:>7} {microseconds(timed['custom'])}"
                for other in others:
                    found = timed.get(other, "refused")
                    ratio = (
                        "" if isinstance(found, str) or isinstance(ours, str) else f"{found.single / ours.single:.2f}"
                    )
                    line += f" {microseconds(found)} {ratio:>8}"
                print(line, flush=True)
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
