"""Many random kills of a rank, or of all ranks of a host, under torchrun over two emulated hosts.

    python tests/mpi/kills.py --kills 100 --seed 1

After each the ranks of the other host must raise PeerLostError that names one of the killed and its host, within 2 s;
all ranks must end by themselves, torchrun start them again, also where one of those is killed while they start, and the
training go on from its checkpoint with the right values. At the end no process and no file may be left on any host.

Prints a line of JSON for each kill, and a report of one line; the exit code tells whether all was well."""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [path for path in (str(HERE.parent), str(HERE)) if path not in sys.path]

from elastic_job import ElasticJob

from rig import Hosts

LIMIT = 2.0  # s: from a kill to the last error on the other host


def kill_while_starting(job, before, rng):
    """Kills one of the generation after ``before``, before it is up or not long after; its rank."""
    size = len(before)
    job.wait(lambda: len(set(job.workers()) - set(before)) == size, f"{size} new workers")
    time.sleep(rng.uniform(0, 5))
    victim = rng.choice([worker for worker in job.workers() if worker not in before])
    job.kill([victim])
    job.wait(lambda: victim not in job.workers(), f"the end of {victim}")
    return victim.rank


def one(job, alive, rng, starting):
    """Kills, and (what was seen, the next generation)."""
    host = rng.choice(job.hosts.names)
    there = [worker for worker in alive if worker.host == host]
    killed = there if rng.random() < 0.5 else [rng.choice(there)]
    time.sleep(rng.uniform(0, 0.5))
    moment = job.kill(killed)
    errors = job.errors(alive)
    named = {
        worker.rank: round(said["time"] - moment, 3)
        for worker, said in errors.items()
        if said["kind"] == "PeerLostError" and any(f"rank {k.rank} on {k.host}" in said["text"] for k in killed)
    }
    others = {worker.rank for worker in alive if worker.host != host}
    seen = {
        "killed": [worker.rank for worker in killed],
        "named after s": named,
        "well": others <= set(named) and all(named[rank] < LIMIT for rank in others),
    }
    if not seen["well"]:
        seen["errors"] = {worker.rank: said for worker, said in errors.items()}
    if starting and rng.random() < starting:
        seen["killed while starting"] = kill_while_starting(job, alive, rng)
    again = job.up(len(alive), but=alive)
    seen["up after s"] = round(time.monotonic() - moment, 1)
    seen["goes on at step"] = job.said(again[0], "up")["first"]
    seen["files"] = sorted(job.shared_memory() - job.files_before)
    return seen, again


def run(kills, starting, seed, folder):
    rng, seen = random.Random(seed), []
    with (
        Hosts() as hosts,
        ElasticJob(hosts, folder, ["--nnodes", 2, "--max-restarts", 2 * kills, "--monitor-interval", 0.1]) as job,
    ):
        for host in hosts.names:
            job.start_agent(host)
        alive = job.up(4)
        for _ in range(kills):
            found, alive = one(job, alive, rng, starting)
            seen.append(found)
            print(json.dumps(found), flush=True)
        job.stop()
        codes = [job.agent_ended(host) for host in hosts.names]
        processes, files = job.left_over()
    other = [max(s["named after s"].values()) for s in seen if s["named after s"]]
    report = {
        "kills": len(seen),
        "of all ranks of a host": sum(len(s["killed"]) > 1 for s in seen),
        "of one while starting again": sum("killed while starting" in s for s in seen),
        "named in time": sum(s["well"] for s in seen),
        "restarts": len(seen),
        "steps": seen[-1]["goes on at step"],
        "errors after s, median and worst": [round(statistics.median(other), 3), max(other)] if other else None,
        "up again after s, median and worst": [
            statistics.median(s["up after s"] for s in seen),
            max(s["up after s"] for s in seen),
        ],
        "exit codes": codes,
        "left over": [processes, sorted(files | {f for s in seen for f in map(tuple, s["files"])})],
    }
    print(json.dumps(report), flush=True)
    steps = [s["goes on at step"] for s in seen]
    return (
        all(s["well"] and not s["files"] for s in seen)
        and steps == sorted(steps)
        and codes == [0, 0]
        and not processes
        and not files
    )


def main():
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--kills", type=int, default=100)
    options.add_argument("--starting", type=float, default=0.2, help="how many restarts are killed amid, of 1")
    options.add_argument("--seed", type=int, default=1)
    given = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="c10d-kills-") as folder:
        sys.exit(not run(given.kills, given.starting, given.seed, Path(folder) / "job"))


if __name__ == "__main__":
    main()
