"""all_reduce under each setting that changes how it is done, in groups of the same processes, beside gloo; then NCCL,
where it can."""

import json
import os

from . import ranks
from .session import OTHERS, Session, microseconds

SIZES = (4, *(n << 10 for n in (16, 64, 256, 1024, 2048, 4096, 8192, 32 << 10, 256 << 10)))
MODE, STAGING, ONE_SHOT, IN_PLACE, HOST, SHARED = (
    f"C10D_CUSTOM_CUDA_{name}"
    for name in ("MODE", "STAGING_BYTES", "ONE_SHOT_BYTES", "IN_PLACE_BYTES", "HOST_BYTES", "P2P_SHARED")
)
BY_GPU_MEMORY = {MODE: "shared", HOST: "0", IN_PLACE: str(1 << 34)}
VARIANTS = {
    "as it is": {},
    "by GPU memory": BY_GPU_MEMORY,
    "in place if it can": {**BY_GPU_MEMORY, IN_PLACE: "0"},
    "staged": {MODE: "staged"},
    "staging of 512 MiB": {**BY_GPU_MEMORY, STAGING: str(512 << 20)},
}
UNDER_MPS = ("as it is", "by GPU memory")
P2P = {"p2p": {MODE: "p2p", SHARED: "1"}}
GRAPH = "p2p, in a graph"


def variants_of(session):
    """{name: backend}"""
    # Else kernels would wait for their turns.
    mps = "CUDA_MPS_PIPE_DIRECTORY" in os.environ or session.device == "simulated"
    wanted = {**P2P, **{name: VARIANTS[name] for name in UNDER_MPS}} if mps else VARIANTS
    found = {name: json.dumps(settings) for name, settings in wanted.items()}
    return {**found, "gloo": "gloo"}


def main():
    session = Session(__doc__)
    for size in (2, 4):
        if not session.wants(size):
            continue
        variants = variants_of(session)
        print(
            f"{size} ranks, float32, microseconds: one call and its end | in a row, per call\n{'bytes':>10} "
            f"{'setting':<20} {'one':>11} {'row':>10}"
        )
        with session.pool(size) as pool:
            for nbytes in sorted((s for s in SIZES if s <= session.largest), key=lambda s: (s not in SIZES[::4], s)):
                if (timed := pool.time("all_reduce", nbytes, tuple(variants.values()))) is None:
                    break
                figures = {name: timed[backend] for name, backend in variants.items()}
                if "p2p" in variants and (timed := pool.time("all_reduce_graph", nbytes, (variants["p2p"],))):
                    figures[GRAPH] = timed[variants["p2p"]]
                for name, found in figures.items():
                    said = found[:120] if isinstance(found, str) else ""
                    print(f"{nbytes:>10} {name:<20} {microseconds(found)} {said}", flush=True)
                    session.add(
                        operation="all_reduce",
                        ranks=size,
                        bytes=nbytes,
                        backend=name if name in OTHERS else "custom",
                        variant=name,
                        **({"refused": found} if isinstance(found, str) else found.as_json()),
                    )
            print(pool.run(ranks.said)[0])
    for size in (2, 4):
        if session.wants(size):
            session.nccl(size, SIZES[::2])
    session.finish()


if __name__ == "__main__":
    main()
