"""The training of scripts/demo, on data that is made here instead of scikit-learn's; each rank says what came out."""

import json
import os
import sys
from pathlib import Path
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts"))
sys.modules["tqdm"] = MagicMock()  # its progress bar, which this environment has not
import demo_train as demo

del sys.modules["tqdm"]  # torch asks whether it is there

PIXELS = 64


def made(images):
    generator = torch.Generator().manual_seed(3)
    x = torch.rand(images, PIXELS, generator=generator)
    return x, (x @ torch.randn(PIXELS, 10, generator=generator)).argmax(1)


torch.set_num_threads(1)
dist.init_process_group(os.environ.get("C10D_TEST_BACKEND", "custom"))
rank, ranks = dist.get_rank(), dist.get_world_size()
x, y = made(1560)
model = DistributedDataParallel(demo.make_model(PIXELS))
run = demo.train("", model, demo.Data("", x[360:], y[360:], x[:360], y[:360]), demo.BATCH, 3, rank, ranks)
hashes = demo.parameter_hashes(model)
said = {"rank": rank, "hash": hashes[rank], "same": len(set(hashes)) == 1, "loss": run.loss}
sys.stdout.write(f"{json.dumps(said)}\n")
sys.stdout.flush()
dist.destroy_process_group()
