"""all_reduce between two emulated hosts whose ranks torchrun starts, beside raw MPI and the wire's own time.

    python tests/mpi/wire.py --ranks 2 --rates 1gbit,4gbit

Prints, first, small messages in microseconds; then, for each rate to which what a host sends is limited, large ones as
multiples of what the wire alone takes (without a limit: milliseconds), and what two groups do at once."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
if str(HERE.parent) not in sys.path:
    sys.path.insert(0, str(HERE.parent))

from rig import Hosts
from rig.torchrun import Torchrun

SMALL = ["-b", "4", "-e", "4K", "-f", "4", "--rounds", "5"]
LARGE = ["-b", "1M", "-e", "64M", "-f", "4", "--rounds", "2", "-n", "4", "-w", "1"]


def run(hosts, ranks, arguments):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    forward = [name for name in environment if name.startswith(("OMP_", "GLOO_", "TORCH", "C10D_", "PYTHON", "PATH"))]
    command = Torchrun().command([ranks, ranks], [sys.executable, *arguments], hosts, forward)
    done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def bench(hosts, ranks, options):
    """{(reference, bytes): median in us}"""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "it.json")
        run(hosts, ranks, ["-m", "c10d_custom", "bench", *options, "--against", "mpi", "--json", file])
        results = json.loads(file.read_text())["results"]
    return {(one["reference"], one["bytes"]): one["median_us"] for one in results}


def bytes_per_second(rate):
    return int(rate.removesuffix("gbit")) * 1e9 / 8


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="on each host (default: %(default)s)")
    parser.add_argument("--rates", default="none,1gbit", help="of none, 1gbit, 4gbit, ... (default: %(default)s)")
    parser.add_argument("--small", type=int, default=3, help="runs of small messages (default: %(default)s)")
    options = parser.parse_args()
    with Hosts() as hosts:
        for _ in range(options.small):
            found = bench(hosts, options.ranks, SMALL)
            sizes = sorted({size for _, size in found})
            print("small, us, ours / raw MPI: ", end="")
            print(", ".join(f"{s} B {found['custom', s]:.0f} / {found['mpi', s]:.0f}" for s in sizes), flush=True)
        for rate in options.rates.split(","):
            limited = rate != "none"
            hosts.rate(rate if limited else None)
            found = bench(hosts, options.ranks, LARGE)
            print(f"{rate}, {'times the wire' if limited else 'ms'}, ours / raw MPI: ", end="")
            units = {s: 1e6 * s / bytes_per_second(rate) if limited else 1e3 for _, s in found}
            print(
                ", ".join(
                    f"{s >> 20} MB {found['custom', s] / unit:.3f} / {found['mpi', s] / unit:.3f}"
                    for s, unit in sorted(units.items())
                ),
                flush=True,
            )
            said = json.loads(run(hosts, options.ranks, [HERE / "scripts" / "two_groups.py", 32 << 20]))
            print(f"{rate}, two groups, ms: ", end="")
            print(", ".join(f"{k} {v:.3g}" for k, v in said.items() if k != "rank" and v is not None), flush=True)


if __name__ == "__main__":
    main()
