"""What scripts/gpu_check runs: presets, each for one stay of less than nine minutes on a machine with a GPU. Parts run
in this order. Standard library only.

`limit` is the most seconds that a part may take; those of a preset add up to less than LIMIT. Filled in are {python},
{device}, {limit}, {site} (where the package is built) and {data} (a folder for files that the report takes in).
"""

from dataclasses import dataclass, field

LIMIT = 540


@dataclass(frozen=True)
class Part:
    name: str
    command: tuple
    limit: float
    cpu: bool = True  # whether --device cpu can try it
    settings: dict = field(default_factory=dict)  # more environment


PYTEST = "{python} -m pytest -q --tb=short --device {device} -p no:cacheprovider -p gpu.check.outcomes".split()


def tests(name, limit, sizes, *arguments, **options):
    files = (f"tests/gpu/{a}" if a.startswith("test_") else a for a in arguments)
    return Part(name, (*PYTEST, "--world-sizes", sizes, *files), limit, **options)


def program(name, limit, module, *arguments, **options):
    return Part(name, ("{python}", "-m", f"gpu.{module}", *arguments), limit, **options)


def bench(name, limit):
    more = f"--device {{device}} --seconds {{limit}} --json {{data}}/{name}.json".split()
    return program(f"bench: {name.replace('_', ' ')}", limit, f"bench.{name}", *more)


MODE = "C10D_CUSTOM_CUDA_MODE"
# Small calls, too:
BY_GPU_MEMORY = {"C10D_CUSTOM_CUDA_HOST_BYTES": "0", "C10D_CUSTOM_CUDA_IN_PLACE_BYTES": str(1 << 34)}
IN_PLACE = {"C10D_CUSTOM_CUDA_IN_PLACE_BYTES": "0"}
NARROW = ("-k", "not large and (all_reduce or reduce_scatter or all_gather or all_to_all_single or send_recv)")
LITTLE = {**BY_GPU_MEMORY, "C10D_CUSTOM_CUDA_STAGING_BYTES": str(1 << 20)}
CASES = ("test_conformance.py", "-k", "not large")

BEGIN = (
    program("set-up", 90, "check.set_up", "{site}", "{device}"),
    program("environment", 25, "check.environment", "--device", "{device}", "{data}/about.json"),
)
COMPILE = program("kernels compiled", 60, "check.compile_all", cpu=False)

PRESETS = {
    "probe": (
        *BEGIN,
        COMPILE,
        program("MPS", 40, "probes.mps", cpu=False),
        tests("fused kernels, ranks of one process", 170, "2", "test_one_gpu.py", cpu=False),
    ),
    "right": (
        *BEGIN,
        COMPILE,
        tests("conformance, 2 ranks", 70, "2", *CASES),
        tests("streams", 50, "2,4", "test_streams.py"),
        tests("DDP, FSDP2, hooks", 40, "2,4", "test_ddp.py", "test_fsdp.py"),
        tests("mixed devices, messages", 30, "2", "test_mixed.py", "test_messages.py"),
        tests("by GPU memory", 50, "2", "test_conformance.py", *NARROW, settings=BY_GPU_MEMORY),
        tests("staged", 45, "2", "test_conformance.py", *NARROW, settings={MODE: "staged"}),
    ),
    "faults": (
        *BEGIN,
        COMPILE,
        tests("faults", 100, "2,4", "test_faults.py"),
        tests("faults, by GPU memory", 75, "2,4", "test_faults.py", settings=BY_GPU_MEMORY),
        tests("memory of processes that end", 40, "2", "test_memory.py", "-k", "ended"),
        tests("p2p", 40, "2,4", "test_p2p.py", settings={MODE: "p2p"}, cpu=False),
    ),
    "more": (
        *BEGIN,
        COMPILE,
        tests("conformance, 4 ranks", 100, "4", *CASES),
        tests("large tensors", 40, "4", "test_conformance.py", "-k", "large"),
        tests("messages, 4 ranks", 25, "4", "test_messages.py"),
        tests("memory of groups", 30, "2,4", "test_memory.py", "-k", "groups"),
        tests("1 MiB of staging", 55, "4", "test_conformance.py", *NARROW, settings=LITTLE),
        tests("in place, if it can be", 45, "2", "test_conformance.py", *NARROW, settings=IN_PLACE, cpu=False),
        tests("programs", 30, "2", "test_programs.py"),
        tests("agreement with gloo and NCCL", 25, "2,4", "test_agreement.py"),
    ),
    "wide": (
        *BEGIN,
        COMPILE,
        tests("conformance, 8 ranks", 190, "8", *CASES),
        tests("8 ranks, by GPU memory", 120, "8", "test_conformance.py", *NARROW, settings=BY_GPU_MEMORY),
    ),
    "speed": (
        *BEGIN,
        COMPILE,
        bench("turns", 20),
        bench("all_reduce", 125),
        bench("ddp", 60),
        bench("modes", 70),
        bench("operations", 50),
        bench("one_rank", 25),
        program("goals", 10, "bench.goals", "{data}"),
    ),
}


def listed():
    lines = []
    for name, parts in PRESETS.items():
        lines.append(f"{name}: {sum(part.limit for part in parts):.0f} s at most")
        lines += [f"    {part.limit:>4.0f} s  {part.name}" for part in parts]
    return "\n".join(lines)
