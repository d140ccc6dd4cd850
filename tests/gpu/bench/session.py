"""One benchmark program: its command line, its pools of ranks, points timed in alternating blocks, its table and
JSON."""

import argparse
import json
import os
import sys
import time

import torch
import torch.distributed as dist

from harness import RankFailure, RankPool

from . import ranks
from .timing import calls_for, figure

ROUNDS = 3
BLOCK = 0.12  # seconds, about
LONGEST = 60  # for one block, on the slowest path tried
FIRST = 15  # for the first calls of another backend
START = 8  # for ranks to start, that are to time something
BEFORE, AFTER = 5, 4  # seconds of --seconds that pass before this program's clock starts, and for the ranks to end


OTHERS = ("gloo", "nccl")


class OutOfTime(Exception):
    pass


class Session:
    def __init__(self, what):
        parser = argparse.ArgumentParser(description=what)
        parser.add_argument("--device", choices=("cuda", "cpu", "simulated"), default="cuda")
        parser.add_argument("--seconds", type=float, default=120, help="within which to end (default: %(default)s)")
        parser.add_argument("--json", metavar="FILE")
        parser.add_argument("--largest", type=int, default=256 << 20, metavar="BYTES", help="leave out larger sizes")
        parser.add_argument("--ranks", default="", help="comma-separated: only these numbers of ranks")
        args = parser.parse_args()
        self.device, self.largest, self._json = args.device, args.largest, args.json
        self.only = [int(n) for n in args.ranks.split(",") if n]
        self._end = time.monotonic() + args.seconds - BEFORE - AFTER
        self.results, self.left_out, self._failed = [], 0, []

    def left(self):
        return self._end - time.monotonic()

    def wants(self, world_size):
        return not self.only or world_size in self.only

    def others(self, size):
        """What to compare with: gloo, and NCCL where each rank has a GPU, or NCCL lets ranks share one, which it calls
        experimental."""
        if self.device != "cuda" or not dist.is_nccl_available():
            return ("gloo",)
        if torch.cuda.device_count() < size:
            if torch.cuda.nccl.version() < (2, 30):
                return ("gloo",)
            os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"  # ranks that are started from now on have it
        return ("gloo", "nccl")

    def pool(self, world_size):
        return _Pool(self, world_size)

    def add(self, **result):
        self.results.append(result)
        if self._json:
            with open(f"{self._json}.part", "w") as f:
                json.dump(self.results, f)
            os.replace(f"{self._json}.part", self._json)

    def keep(self, size, nbytes, timed, **more):
        """What was timed of an all_reduce."""
        for name, found in timed.items():
            figures = {"refused": found} if isinstance(found, str) else found.as_json()
            self.add(operation="all_reduce", ranks=size, bytes=nbytes, backend=name, **more, **figures)

    def nccl(self, size, sizes):
        """NCCL's all_reduce, where there can be one, in ranks of its own, after all else: where they share a GPU it may
        as well hang."""
        if "nccl" not in self.others(size):
            return
        if self.left() < START:
            self.left_out += 1
            return
        print(f"\nall_reduce of NCCL, {size} ranks, microseconds, likewise\n{'bytes':>10} {'nccl':>11} {'row':>10}")
        with self.pool(size) as pool:
            for nbytes in (s for s in sizes if s <= self.largest):
                timed = pool.time("all_reduce", nbytes, ("nccl",))
                if timed is None or pool.gone:
                    break
                self.keep(size, nbytes, timed)
                print(f"{nbytes:>10} {microseconds(timed['nccl'])}", flush=True)

    def fail(self, what):
        self._failed.append(what)
        print(f"FAILED: {what}", flush=True)

    def finish(self, summary=""):
        """Ends the program."""
        problems = [summary] if summary else []
        if self.left_out:
            problems.append(f"{self.left_out} points left out for lack of time")
        problems += [what.splitlines()[0][:150] for what in self._failed]
        print(f"SUMMARY: {'; '.join(problems) or f'{len(self.results)} figures'}")
        sys.exit(bool(self._failed or self.left_out))


class _Pool:
    """Ranks of the backend "custom", for the length of a with block."""

    def __init__(self, session, world_size):
        self.session, self.world_size = session, world_size
        self.gone = {}  # {a backend that is not tried again: why}

    def __enter__(self):
        self._pool = RankPool(self.world_size, "custom")
        self.run(ranks.listen)
        return self

    def __exit__(self, kind, error, trace):
        if kind is None and (problem := self._pool.close()):
            self.session.fail(problem)
        self._pool.discard()
        if kind is OutOfTime:
            return True
        if kind and issubclass(kind, RankFailure):
            self.session.fail(f"{self.world_size} ranks: {error}")
            return True
        return False

    def run(self, function, *arguments, limit=LONGEST):
        if self.session.left() <= 0:
            raise OutOfTime
        try:
            return self._pool.run(function, *arguments, timeout=min(limit, self.session.left()))
        except RankFailure:
            if self.session.left() > 0:
                raise
            raise OutOfTime from None

    def first(self, backend, function, *arguments):
        """`run` of a backend's first calls. None, and `gone`, where another's than ours fail: what is run next starts
        the ranks anew."""
        if backend in self.gone:
            return None
        try:
            return self.run(function, *arguments, limit=FIRST if backend in OTHERS else LONGEST)
        except RankFailure as failure:
            if backend not in OTHERS:
                raise
            self.gone[backend] = f"{backend} failed"
            print(f"{backend}, {self.world_size} ranks, failed: {failure}"[:2000], flush=True)
            return None

    def time(self, operation, size, backends):
        """{backend: Figure, or the text of its refusal}, in alternating blocks; None where no time is left."""
        kind, count = self.session.device, max(1, size // 4)
        if self.session.left() < 2:
            self.session.left_out += 1
            return None
        blocks, calls, refused = {b: [] for b in backends}, {}, {}
        try:
            for backend in backends:
                first = self.first(backend, ranks.block, kind, backend, operation, count, 2)
                if first is None:
                    refused[backend] = self.gone[backend]
                elif isinstance(first[0], str):
                    refused[backend] = first[0]
                else:
                    calls[backend] = calls_for(max(min(t.single) for t in first), BLOCK)
            for _ in range(ROUNDS):
                for backend in calls:
                    blocks[backend].append(self.run(ranks.block, kind, backend, operation, count, calls[backend]))
        except OutOfTime:
            if not calls or not all(blocks[b] for b in calls):
                self.session.left_out += 1
                return None
        return {b: refused.get(b) or figure(blocks[b]) for b in backends}

    def check(self, operation, size, backend="custom"):
        """Wrong elements over all ranks, of one call."""
        return sum(self.run(ranks.wrong_elements, self.session.device, backend, operation, max(1, size // 4)))


def microseconds(figure):
    """Two columns: single and row."""
    return (
        f"{'refused':>11} {'':>10}"
        if isinstance(figure, str)
        else f"{figure.single * 1e6:>11.1f} {figure.row * 1e6:>10.1f}"
    )
