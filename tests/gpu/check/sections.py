"""The sections of scripts/gpu_check, in the order in which they run: what proves most comes first, benchmarks last.

`limit` is the most seconds a section may take, `least` what it is sure to get however long those before it took.
{python}, {device}, {limit} and {work} are filled in; {work} is a folder that the sections of one run share.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Section:
    name: str
    command: tuple
    limit: float
    least: float
    cpu: bool = True  # whether --device cpu can try it
    settings: dict = field(default_factory=dict)  # more environment, which the package must know: else not run


def tests(name, *arguments, limit, least, sizes=None, **options):
    chosen = ("--world-sizes", sizes) if sizes else ()
    return Section(
        name,
        (
            "{python}",
            "-m",
            "pytest",
            "-q",
            "--tb=short",
            "--device",
            "{device}",
            "-p",
            "no:cacheprovider",
            "-p",
            "gpu.check.outcomes",
            *chosen,
            *(f"tests/gpu/{a}" if a.startswith("test_") else a for a in arguments),
        ),
        limit,
        least,
        **options,
    )


def program(name, module, *arguments, limit, least, **options):
    return Section(name, ("{python}", "-m", f"gpu.{module}", *arguments), limit, least, **options)


def probe(name, module, limit=25):
    return program(name, f"probes.{module}", limit=limit, least=5, cpu=False)


def bench(name, limit, least, *arguments, **options):
    return program(
        f"bench: {name.replace('_', ' ')}",
        f"bench.{name}",
        *arguments,
        "--device",
        "{device}",
        "--seconds",
        "{limit}",
        "--json",
        "{work}/" + f"{name}.json",
        limit=limit,
        least=least,
        **options,
    )


MODE, ORDER, STAGING = "C10D_CUSTOM_CUDA_MODE", "C10D_CUSTOM_CUDA_ORDER", "C10D_CUSTOM_CUDA_STAGING_BYTES"
NARROW = ("-k", "not large and (all_reduce or reduce_scatter or all_gather or all_to_all_single or send_recv)")

SECTIONS = (
    program("environment", "check.environment", "--device", "{device}", limit=30, least=10),
    probe("probe: IPC memory", "ipc_memory"),
    probe("probe: IPC events", "ipc_events", 30),
    probe("probe: stream memory operations", "stream_memops", 30),
    probe("probe: MPS", "mps", 40),
    program("kernels compiled", "check.compile_all", limit=90, least=10, cpu=False),
    tests("conformance, 2 ranks", "test_conformance.py", "-k", "not large", sizes="2", limit=90, least=25),
    tests("conformance, 4 ranks", "test_conformance.py", "-k", "not large", sizes="4", limit=80, least=25),
    tests("conformance, 8 ranks", "test_conformance.py", "-k", "not large", sizes="8", limit=90, least=25),
    tests("faults", "test_faults.py", sizes="2,4", limit=100, least=30),
    tests("streams", "test_streams.py", sizes="2,4", limit=60, least=15),
    tests("DDP, FSDP2, hooks", "test_ddp.py", "test_fsdp.py", sizes="2,4", limit=70, least=15),
    tests("large tensors", "test_conformance.py", "-k", "large", sizes="4", limit=45, least=8),
    tests("messages, mixed devices", "test_messages.py", "test_mixed.py", sizes="2,4", limit=45, least=10),
    tests("programs of the articles", "test_programs.py", sizes="2", limit=40, least=10),
    tests("memory", "test_memory.py", sizes="2,4", limit=45, least=10),
    tests("agreement with gloo and NCCL", "test_agreement.py", sizes="1,2,4", limit=50, least=8),
    tests("conformance, 1 rank", "test_conformance.py", "-k", "not large", sizes="1", limit=40, least=8),
    tests(
        "conformance, 1 MiB of staging",
        "test_conformance.py",
        *NARROW,
        sizes="4",
        limit=50,
        least=5,
        settings={STAGING: str(1 << 20)},
    ),
    tests(
        "conformance, staged", "test_conformance.py", *NARROW, sizes="2", limit=40, least=5, settings={MODE: "staged"}
    ),
    tests(
        "conformance, stream memory operations",
        "test_conformance.py",
        *NARROW,
        sizes="2",
        limit=40,
        least=5,
        settings={ORDER: "values"},
        cpu=False,
    ),
    tests("p2p", "test_p2p.py", sizes="1,2,4", limit=40, least=5, settings={MODE: "p2p"}, cpu=False),
    Section(
        "p2p under MPS",
        (
            "{python}",
            "-m",
            "gpu.probes.mps",
            "{python}",
            "-m",
            "pytest",
            "-q",
            "--tb=short",
            "-p",
            "no:cacheprovider",
            "-p",
            "gpu.check.outcomes",
            "--world-sizes",
            "2,4",
            "tests/gpu/test_p2p.py",
        ),
        40,
        5,
        settings={MODE: "p2p"},
        cpu=False,
    ),
    bench("all_reduce", 120, 50),
    bench("ddp", 60, 20),
    bench("modes", 70, 15),
    bench("operations", 50, 15),
    bench("one_rank", 25, 8),
    program("goals", "bench.goals", "{work}", limit=10, least=3),
)
