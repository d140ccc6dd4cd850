"""What scripts/gpu_check runs: presets, each for one stay on a machine with a GPU. Parts run in this order. Standard
library only.

`limit` is the most seconds that a part may take; those of a preset add up to no more than its time in SECONDS. Filled
in are {python}, {device}, {limit}, {site} (where the package is built) and {data} (a folder for files that the report
takes in).
"""

from dataclasses import dataclass, field, replace

SECONDS = {"once": 540, "more": 300, "cores": 120, "rest": 540, "wide": 540}
WITHOUT_GPU = ("cores",)


@dataclass(frozen=True)
class Part:
    name: str
    command: tuple
    limit: float
    simulated: bool = True  # whether --device simulated can try it
    settings: dict = field(default_factory=dict)  # more environment
    short: tuple = ()  # more words of the command, with --short


PYTEST = "{python} -m pytest -q --tb=short --device {device} -p no:cacheprovider -p gpu.check.outcomes".split()


def tests(name, limit, sizes, *arguments, **options):
    files = (f"tests/gpu/{a}" if a.startswith("test_") else a for a in arguments)
    return Part(name, (*PYTEST, "--world-sizes", sizes, *files), limit, short=("--few", "2"), **options)


def program(name, limit, module, *arguments, **options):
    return Part(name, ("{python}", "-m", f"gpu.{module}", *arguments), limit, **options)


def bench(name, limit, largest=1024, more=()):
    words = f"--device {{device}} --seconds {{limit}} --json {{data}}/{name}.json".split()
    short = ("--largest", str(largest))
    return program(f"bench: {name.replace('_', ' ')}", limit, f"bench.{name}", *words, *more, short=short)


def under_mps(part):
    return replace(part, command=("{python}", "-m", "gpu.mps", "{device}", *part.command))


def graphs(name, settings=None):
    return tests(name, 38, "2", "test_users.py", "-k", "reduce_overhead", settings=settings or {})


# CPU tensors on all the machine's cores, beside gloo and, where mpi4py finds one, raw MPI.
_MACHINE = "{python} -m c10d_custom bench --machine --limit {limit} --json {data}/cores.json"
CORES = Part("bench: CPU tensors, 2 ranks to all cores", tuple(_MACHINE.split()), 55, short=("-r", "2"))

MODE = "C10D_CUSTOM_CUDA_MODE"
# Small calls, too:
BY_GPU_MEMORY = {"C10D_CUSTOM_CUDA_HOST_BYTES": "0", "C10D_CUSTOM_CUDA_IN_PLACE_BYTES": str(1 << 34)}
IN_PLACE = {"C10D_CUSTOM_CUDA_IN_PLACE_BYTES": "0"}
P2P = {MODE: "p2p", "C10D_CUSTOM_CUDA_P2P_SHARED": "1"}
NARROW = ("-k", "not large and (all_reduce or reduce_scatter or all_gather or all_to_all_single or send_recv)")
LITTLE = {**BY_GPU_MEMORY, "C10D_CUSTOM_CUDA_STAGING_BYTES": str(1 << 20)}
CASES = ("test_conformance.py", "-k", "not large")

BEGIN = (
    program("set-up", 55, "check.set_up", "{site}", "{device}"),
    program("environment", 10, "check.environment", "--device", "{device}", "{data}/about.json"),
)
COMPILE = program("kernels compiled", 20, "check.compile_all", "{device}")

PRESETS = {
    "once": (
        *BEGIN,
        COMPILE,
        tests("conformance, 2 ranks", 43, "2", *CASES),
        program("MPS", 14, "probes.mps", simulated=False),
        under_mps(tests("p2p, 2 ranks", 38, "2", "test_p2p.py", settings=P2P)),
        under_mps(tests("p2p, 4 ranks", 32, "4", "test_p2p.py", settings=P2P)),
        under_mps(tests("p2p: DDP, FSDP2", 24, "2", "test_ddp.py", "test_fsdp.py", settings=P2P)),
        under_mps(bench("modes", 34)),
        bench("all_reduce", 36, more=("--ranks", "4,2")),
        bench("operations", 34, 1 << 16, ("--largest", str(4 << 20))),
        bench("one_rank", 22),
        bench("turns", 25, more=("--ranks", "4")),
        program("goals", 7, "bench.goals", "{data}"),
        tests("by GPU memory", 34, "2", "test_conformance.py", *NARROW, settings=BY_GPU_MEMORY),
        tests("faults, by GPU memory", 35, "2,4", "test_faults.py", settings=BY_GPU_MEMORY),
        tests("memory of groups", 24, "2,4", "test_memory.py", "-k", "groups"),
        under_mps(tests("p2p faults", 53, "2", "test_p2p_faults.py", settings=P2P)),
    ),
    "more": (
        *BEGIN,
        COMPILE,
        tests("conformance, 4 ranks", 77, "4", *CASES),
        tests(
            "fused kernels, 8 ranks of one process", 60, "2", "test_one_gpu.py", "-k", "ever and 8 or memcheck and 8"
        ),
        tests("1 MiB of staging", 45, "4", "test_conformance.py", *NARROW, settings=LITTLE),
        bench("ddp", 33, 400_000),
    ),
    "cores": (*BEGIN, CORES),
    "rest": (
        *BEGIN,
        COMPILE,
        tests("streams", 38, "2,4", "test_streams.py"),
        tests("DDP, FSDP2, hooks", 40, "2,4", "test_ddp.py", "test_fsdp.py"),
        tests("mixed devices, messages", 30, "2", "test_mixed.py", "test_messages.py"),
        tests("staged", 35, "2", "test_conformance.py", *NARROW, settings={MODE: "staged"}),
        tests("in place, if it can be", 38, "2", "test_conformance.py", *NARROW, settings=IN_PLACE),
        tests("faults", 45, "2,4", "test_faults.py"),
        tests("memory of processes that end", 30, "2", "test_memory.py", "-k", "ended"),
        tests("large tensors", 36, "4", "test_conformance.py", "-k", "large"),
        tests("messages, 4 ranks", 25, "4", "test_messages.py"),
        tests("programs", 30, "2", "test_programs.py"),
        tests("what users run", 38, "2", "test_users.py", "-k", "not reduce_overhead"),
        tests("agreement with gloo and NCCL", 30, "2,4", "test_agreement.py"),
        under_mps(graphs("p2p: compiled DDP, FSDP2 as graphs", P2P)),
    ),
    "wide": (
        *BEGIN,
        COMPILE,
        tests("conformance, 8 ranks", 177, "8", *CASES),
        tests("8 ranks, by GPU memory", 115, "8", "test_conformance.py", *NARROW, settings=BY_GPU_MEMORY),
        graphs("compiled DDP, FSDP2 as graphs"),
        tests("fused kernels, ranks of one process", 125, "2", "test_one_gpu.py"),
    ),
}


def listed():
    lines = []
    for name, parts in PRESETS.items():
        lines.append(f"{name}: {sum(part.limit for part in parts):.0f} s at most")
        lines += [f"    {part.limit:>6.1f} s  {part.name}" for part in parts]
    return "\n".join(lines)
