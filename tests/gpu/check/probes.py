"""The probes, as ``python -m c10d_custom doctor --probe`` asks them, with a copy of what they found for the report.

python -m gpu.check.probes DEVICE SECONDS FILE     DEVICE cpu: of a simulated GPU, whose answers nobody keeps
"""

import functools
import json
import multiprocessing
import os
import sys
import tempfile

from c10d_custom.doctor import probing
from c10d_custom.doctor.probes import run
from c10d_custom.doctor.probes.gpu import Gpu
from gpu.probes.simulated import SimulatedGpu, World

AROUND = 8  # seconds for the last processes to end


def main(device, seconds, file):
    make = Gpu
    if device == "cpu":
        os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp()
        make = functools.partial(SimulatedGpu, World(tempfile.mkdtemp(), death="ends"))
        run.METHOD = "forkserver"  # one that has torch already
        multiprocessing.set_forkserver_preload(["gpu.probes.simulated"])

    def answered(words):
        with open(f"{file}.part", "w") as f:
            json.dump(words, f)
        os.replace(f"{file}.part", file)

    code = probing.ask_and_keep(make, float(seconds) - AROUND, functools.partial(print, flush=True), answered)
    with open(file) as f:
        said = json.load(f)["answers"]
    order = probing.decide(said)["order"].choice
    print(f"SUMMARY: {len(said)} of {len(probing.QUESTIONS)} questions answered; order {order}")
    return int(code > 1 or not said)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
