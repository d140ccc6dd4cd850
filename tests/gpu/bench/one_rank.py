"""What a call costs one rank alone: "custom" beside NCCL, whose launch is the floor for anything that launches a
kernel."""

import torch
import torch.distributed as dist

from .session import Session, microseconds


def main():
    session = Session(__doc__)
    others = ("nccl",) if session.device == "cuda" and dist.is_nccl_available() else ("gloo",)
    if session.device == "cuda":
        version = torch.cuda.nccl.version()
        print(
            f"NCCL {'.'.join(map(str, version))}: "
            + (
                "several ranks on one GPU only with NCCL_MULTI_RANK_GPU_ENABLE=1"
                if version >= (2, 30)
                else "refuses several ranks on one GPU"
            )
        )
    with session.pool(1) as pool:
        print(
            f"1 rank, all_reduce, microseconds: one call and its end | in a row, per call\n{'bytes':>10} "
            f"{'custom':>11} {'row':>10} "
            f"{others[0]:>11} {'row':>10}"
        )
        for nbytes in (s for s in (4, 1 << 20, 64 << 20) if s <= session.largest):
            timed = pool.time("all_reduce", nbytes, ("custom", *others))
            if timed is None:
                continue
            print(f"{nbytes:>10} {' '.join(microseconds(found) for found in timed.values())}", flush=True)
            for backend, found in timed.items():
                session.add(
                    operation="all_reduce",
                    ranks=1,
                    bytes=nbytes,
                    backend=backend,
                    **({"refused": found} if isinstance(found, str) else found.as_json()),
                )
    session.finish()


if __name__ == "__main__":
    main()
