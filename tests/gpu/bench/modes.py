"""all_reduce by 4 ranks under each setting that changes how it is done, in groups of the same processes."""

import json

from c10d_custom import config

from . import ranks
from .session import Session, microseconds

SIZES = (4, *(n << 10 for n in (16, 64, 256, 1024, 2048, 4096, 8192, 32 << 10, 256 << 10)))
# Each is tried where the package has its variables.
MODE, ORDER, STAGING, ONE_SHOT, IN_PLACE, HOST = (
    f"C10D_CUSTOM_CUDA_{name}"
    for name in ("MODE", "ORDER", "STAGING_BYTES", "ONE_SHOT_BYTES", "IN_PLACE_BYTES", "HOST_BYTES")
)
BY_GPU_MEMORY = {MODE: "shared", HOST: "0", IN_PLACE: str(1 << 34)}
VARIANTS = {
    "as it is": {},
    "by GPU memory": BY_GPU_MEMORY,
    "memory operations": {**BY_GPU_MEMORY, ORDER: "values"},
    "one-shot only": {**BY_GPU_MEMORY, ONE_SHOT: str(1 << 30)},
    "two-shot only": {**BY_GPU_MEMORY, ONE_SHOT: "0"},
    "in place if it can": {**BY_GPU_MEMORY, IN_PLACE: "0"},
    "staged": {MODE: "staged"},
    "staging of 512 MiB": {**BY_GPU_MEMORY, STAGING: str(512 << 20)},
}


def main():
    session = Session(__doc__)
    known = {name for name, *_ in config.table()}
    variants = {name: json.dumps(settings) for name, settings in VARIANTS.items() if set(settings) <= known}
    for name in VARIANTS.keys() - variants.keys():
        print(f"{name}: this package does not know {', '.join(sorted(set(VARIANTS[name]) - known))}")
    print(
        f"4 ranks, float32, microseconds: one call and its end | in a row, per call\n{'bytes':>10} {'setting':<20} "
        f"{'custom':>11} {'row':>10}"
    )
    with session.pool(4) as pool:
        for nbytes in (s for s in SIZES if s <= session.largest):
            timed = pool.time("all_reduce", nbytes, tuple(variants.values()))
            for name, key in variants.items() if timed else ():
                found = timed[key]
                print(
                    f"{nbytes:>10} {name:<20} {microseconds(found)} {found if isinstance(found, str) else ''}",
                    flush=True,
                )
                session.add(
                    operation="all_reduce",
                    ranks=4,
                    bytes=nbytes,
                    backend="custom",
                    variant=name,
                    **({"refused": found} if isinstance(found, str) else found.as_json()),
                )
        print(pool.run(ranks.said)[0])
    session.finish()


if __name__ == "__main__":
    main()
