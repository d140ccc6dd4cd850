"""What it takes the ranks of a job over emulated hosts to make their first group, with MPI over the store.

    python tests/mpi/start_up.py --sizes 8,16,32,64 --json start-up.json

Prints, for each number of ranks, seconds until the last one had its group, and how many operations on the store each
rank made; then what the store's server takes for one. `python scripts/bench model --start-up FILE` reads the JSON."""

import argparse
import functools
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
if str(HERE.parent) not in sys.path:
    sys.path.insert(0, str(HERE.parent))

from rig import Hosts

SCRIPT = HERE / "scripts" / "start_up.py"


def start_up(hosts, ranks_per_host, seconds=200):
    """What each rank said, in rank order."""
    size, port = sum(ranks_per_host), random.randrange(20000, 30000)
    running, first = [], 0
    for name, count in zip(hosts.names, ranks_per_host, strict=True):
        command = [sys.executable, SCRIPT, hosts.addresses[hosts.names[0]], port, size, first, count]
        running.append(
            subprocess.Popen(
                hosts.command(name, command),
                env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        first += count
    try:
        assert all(process.stdout.readline() == "ready\n" for process in running)
        for process in running:
            process.stdin.write("go\n")
            process.stdin.flush()
        ended = [process.communicate(timeout=seconds) for process in running]
    finally:
        for process in running:
            process.kill()
    codes = [process.returncode for process in running]
    assert codes == [0] * len(codes), (codes, *(errors for _, errors in ended))
    said = sorted((json.loads(line) for out, _ in ended for line in out.splitlines()), key=lambda one: one["rank"])
    assert [(one["rank"], one["sum"]) for one in said] == [(r, size * (size - 1) // 2) for r in range(size)], said
    return said


def roles(said, ranks_per_host):
    """{role: its ranks}: rank 0, the first of other hosts, all others."""
    firsts = {sum(ranks_per_host[:i]) for i in range(1, len(ranks_per_host))}
    found = {"rank 0": [], "first of a host": [], "other": []}
    for one in said:
        found["first of a host" if one["rank"] in firsts else "other" if one["rank"] else "rank 0"].append(one)
    return found


def operations(said, ranks_per_host):
    """{role: {whose: {kind: how many}}}; the most of each that any such rank made."""
    return {
        role: {
            whose: dict(functools.reduce(Counter.__or__, (Counter(one["operations"][whose]) for one in ranks)))
            for whose in ("group", "mpi")
        }
        for role, ranks in roles(said, ranks_per_host).items()
    }


def handed_out(said, ranks_per_host, whose):
    """{role: bytes}; the most that the store handed to any such rank."""
    return {
        role: max(one["bytes"].get(whose, 0) for one in ranks) for role, ranks in roles(said, ranks_per_host).items()
    }


def seconds(said):
    """Until the last rank had its group, and the longest that MPI took of it."""
    return max(one["seconds"] for one in said), max(one["mpi_seconds"] for one in said)


def store_costs(seconds=1.0, clients=3):
    """What a store's server takes for an operation, and for each byte it hands out: its processor time, since clients
    want some of the same cores."""
    import torch  # noqa: F401  before the forks
    from torch.distributed import TCPStore

    def each(length):
        port = random.randrange(20000, 30000)
        end, ended = os.pipe()
        server = os.fork()
        if server == 0:
            os.close(ended)
            store = TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)
            os.read(end, 1)
            del store
            os._exit(0)
        read, write = os.pipe()
        for _ in range(clients):
            if os.fork() == 0:
                store = TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
                store.set("key", length * "x")
                until, count = time.monotonic() + seconds, 0
                while time.monotonic() < until:
                    store.compare_set("key", "-", "-")
                    count += 1
                os.write(write, count.to_bytes(8))
                os._exit(0)
        made = sum(int.from_bytes(os.read(read, 8)) for _ in range(clients))
        os.write(ended, b"x")
        used = {pid: usage for pid, _, usage in (os.wait3(0) for _ in range(clients + 1))}[server]
        for number in (end, ended, read, write):
            os.close(number)
        return (used.ru_utime + used.ru_stime) / made

    small, large = each(8), each(1 << 16)
    return small, (large - small) / (1 << 16)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--sizes", default="8,16,32,64", help="numbers of ranks (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=1, help="of which the median counts (default: %(default)s)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    operation, byte = store_costs()
    print(f"the store's server: {operation * 1e6:.1f} us for an operation, {byte * 1e9:.2f} ns for a byte", flush=True)
    print("operations of a rank on the store: for the group + for MPI, looks left out")
    print(
        f"{'ranks':>5} {'seconds':>8} {'of MPI':>7} {'rank 0':>9} {'first':>9} {'other':>9} {'looks':>6} {'bytes':>8}"
    )
    runs = []
    with Hosts([f"host{letter}" for letter in "abcdefgh"[: options.hosts]]) as hosts:
        for size in map(int, options.sizes.split(",")):
            each = [size // options.hosts + (host < size % options.hosts) for host in range(options.hosts)]
            rounds = [start_up(hosts, each) for _ in range(options.rounds)]
            made = operations(rounds[-1], each)
            total, mpi = (statistics.median(figures) for figures in zip(*map(seconds, rounds), strict=True))
            counts = ["+".join(str(sum(made[role][whose].values())) for whose in ("group", "mpi")) for role in made]
            looks = round(statistics.mean(one["looks"] for one in rounds[-1]))
            handed = sum(sum(one["bytes"].values()) for one in rounds[-1])
            print(
                f"{size:>5} {total:>8.2f} {mpi:>7.2f} "
                + " ".join(f"{count:>9}" for count in counts)
                + f" {looks:>6} {handed:>8}",
                flush=True,
            )
            runs.append({"hosts": each, "seconds": total, "mpi_seconds": mpi, "looks": looks, "bytes": handed})
    if options.json:
        options.json.write_text(
            json.dumps({"operation": operation, "byte": byte, "cores": os.cpu_count(), "runs": runs})
        )


if __name__ == "__main__":
    main()
