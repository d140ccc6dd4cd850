"""Ray Train: TorchTrainer. Rank 0 is its driver; the workers that it starts are the ranks of the training, and each
rank here tells what a worker made."""

import os
import tempfile

import cases
import torch
from cases import case
from torch.nn.parallel import DistributedDataParallel

os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_worker_niceness": "0"}
import ray  # noqa: E402
from ray.train import RunConfig, ScalingConfig  # noqa: E402
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model  # noqa: E402


def worker(config):
    torch.set_num_threads(1)
    rank = ray.train.get_context().get_world_rank()
    net = prepare_model(cases.model())
    if not isinstance(net, DistributedDataParallel):
        raise RuntimeError(f"prepare_model gave {type(net).__name__}: no gradient is shared")
    weights = cases.train(net, torch.optim.AdamW(net.parameters(), lr=0.1), rank)
    torch.save({"weights": weights, "backends": list(cases.group_names())}, f"{config['folder']}/worker-{rank}")


def drive(backend, folder):
    """The workers have this process's environment, C10D_CUSTOM_REPLACES among it."""
    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=100 * 2**20)
    try:
        TorchTrainer(
            worker,
            train_loop_config={"folder": folder},
            torch_config=TorchConfig(backend=backend, timeout_s=60),
            scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
            run_config=RunConfig(storage_path=folder),
        ).fit()
    finally:
        ray.shutdown()


@case
def torch_trainer(backend):
    done = f"driven {backend}"
    if cases.rank() == 0:
        folder = tempfile.mkdtemp()
        try:
            drive(backend, folder)
        finally:
            cases.tell(done, folder)
    told = torch.load(f"{cases.told(done)}/worker-{cases.rank()}")
    cases.made_of(*told["backends"])
    return told["weights"]


if __name__ == "__main__":
    cases.main()
