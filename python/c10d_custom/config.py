"""Every environment variable of this package, with its default and limits (sizes, numbers of calls, times), read once
per process. docs/configuration.md is made of them (scripts/doc_tables.py)."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from typing import Any

ALGORITHMS = "best", "slots", "two_steps", "rings", "in_place"  # in the order of backend/shm/algorithm.h
REPLACEABLE = ("gloo",)  # backends whose name this one can answer to (c10d/replacing.py)


class _Setting:
    """One variable. ``low``, ``high``: of a number; ``among``: what a choice can be, None where it is any text."""

    __slots__ = ("variable", "default", "doc", "low", "high", "among")

    def __init__(
        self,
        variable: str,
        default: int | str,
        doc: str,
        low: int = 0,
        high: int = 0,
        among: tuple[str, ...] | None = None,
    ) -> None:
        self.variable, self.default, self.doc = variable, default, doc
        self.low, self.high, self.among = low, high, among

    def value(self, text: str) -> int | str:
        """Returns the value that a text stands for. ValueError for a text that the variable cannot have."""
        if isinstance(self.default, str):
            if self.among and text not in self.among:
                raise ValueError(f"{self.variable}={text!r}: must be one of {', '.join(self.among)}")
            return text
        try:
            value = int(text)
        except ValueError:
            value = self.low - 1
        if not self.low <= value <= self.high:
            raise ValueError(f"{self.variable}={text!r}: must be an integer from {self.low} to {self.high}")
        return value


# As attributes of Config itself; those of its instances are the values.


def _number(variable: str, default: int, low: int, high: int, doc: str) -> Any:
    return _Setting(variable, default, doc, low, high)


def _choice(variable: str, default: str, among: tuple[str, ...], doc: str) -> Any:
    return _Setting(variable, default, doc, among=among)


def _text(variable: str, doc: str) -> Any:
    return _Setting(variable, "", doc)


class Config:  # no dataclass: what those compile takes its time at a rank's start
    """What the environment variables say; attributes in the order of docs/configuration.md. Defaults, and the least and
    the largest that `from_env` takes, stand beside each. Sizes are bytes; ``spin_us`` is microseconds."""

    block_bytes: int = _number(
        "C10D_CUSTOM_BLOCK_BYTES", 128 << 10, 4096, 1 << 26, "bytes of one block of a rank's ring (a multiple of 4096)"
    )
    window: int = _number("C10D_CUSTOM_WINDOW", 8, 2, 4096, "blocks in a rank's ring")
    small_bytes: int = _number(
        "C10D_CUSTOM_SMALL_BYTES", 16 << 10, 64, 1 << 24, "largest input that travels with the announcement of its call"
    )
    cell_bytes: int = _number(
        "C10D_CUSTOM_CELL_BYTES", 32 << 10, 64, 1 << 26, "payload of one cell of a point-to-point ring"
    )
    cells: int = _number(
        "C10D_CUSTOM_CELLS", 32, 2, 65536, "cells in the ring between two ranks (fewer in groups above 8 ranks)"
    )
    chunk_bytes: int = _number(
        "C10D_CUSTOM_CHUNK_BYTES",
        256 << 10,
        65536,
        1 << 30,
        "between hosts: bytes of one piece of a large message for each rank that carries it",
    )
    spin_us: int = _number(
        "C10D_CUSTOM_SPIN_US",
        200,
        0,
        1_000_000,
        "microseconds that a rank which waits for another of its host stays awake, yielding its core, before it "
        "sleeps. One that waits for MPI stays awake ten times as long in a small all_reduce, one and a half times as "
        "long in all else. Where a yield takes so long that other work must have had the core, the rank sleeps at once "
        "for a while (backend/shm/waiting.h)",
    )
    tree_ranks: int = _number(
        "C10D_CUSTOM_TREE_RANKS",
        16,
        2,
        4096,
        "from how many ranks of a host on they tell each other of a call by a combining tree, in which each looks at a "
        "few of the others, rather than at all of them",
    )
    algorithm: str = _choice(
        "C10D_CUSTOM_ALGORITHM",
        "best",
        ALGORITHMS,
        "for tests and measurements: which way collectives of CPU tensors on one host go, where they can "
        "(docs/internals/cost-model.md)",
    )
    cool: int = _number(
        "C10D_CUSTOM_COOL",
        0,
        0,
        1,
        "1: for machines that must stay cool. Who waits sleeps at once, as with `C10D_CUSTOM_SPIN_US=0`, and, where "
        "the processor can wait for a cache line (WAITPKG, MWAITX), in the deeper of its states",
    )
    threads: int = _number(
        "C10D_CUSTOM_THREADS",
        0,
        0,
        64,
        "how many threads of a rank share the copies and reductions of a collective of 1 MiB and more, the calling one "
        "among them (`bench --threads` shows what that gains); 0: up to 4 where a rank has at least 4 cores to itself, "
        "of its affinity mask and its cgroup's share of the processors, and so many in each call as find an idle core; "
        "else one",
    )
    launcher: str = _choice(
        "C10D_CUSTOM_LAUNCHER",
        "1",
        ("0", "1", "import"),
        "what is taken from an MPI launcher (docs/several-hosts.md): 0: nothing; 1: rank and rendezvous of groups of "
        "this backend, in `init_process_group`; `import`: of other backends' groups, too, and RANK, LOCAL_RANK and the "
        "like are set at `import torch`, for scripts that read them before",
    )

    replaces: str = _choice(
        "C10D_CUSTOM_REPLACES",
        "",
        ("", *REPLACEABLE),
        "`gloo`: groups that are asked for by that name are made by this backend (docs/frameworks.md); read at "
        "`import torch`",
    )

    cuda_mode: str = _choice(
        "C10D_CUSTOM_CUDA_MODE",
        "auto",
        ("auto", "p2p", "shared", "staged"),
        "how CUDA tensors travel inside a host: `p2p` (each rank its own GPU), `shared` (ranks "
        "share GPUs), `staged` (through host memory), or `auto`: the first that works",
    )
    cuda_p2p_shared: int = _number(
        "C10D_CUSTOM_CUDA_P2P_SHARED",
        0,
        0,
        1,
        "1, for tests: `C10D_CUSTOM_CUDA_MODE=p2p` is taken, too, where ranks share a GPU, as clients of MPS, which "
        "runs kernels of all of them at once",
    )
    cuda_staging_bytes: int = _number(
        "C10D_CUSTOM_CUDA_STAGING_BYTES",
        64 << 20,
        1 << 16,
        1 << 34,
        "bytes of GPU memory that a rank of a group keeps for data on its way (a "
        "multiple of 65536; as much pinned host memory at most, in staged mode)",
    )
    cuda_one_shot_bytes: int = _number(
        "C10D_CUSTOM_CUDA_ONE_SHOT_BYTES",
        512 << 10,
        0,
        1 << 34,
        "largest all_reduce of CUDA tensors, in rounds of copies, in which every rank reads every rank's "
        "whole input; above, each rank reduces its part. Ranks that all share one GPU: of any size. Where kernels of "
        "several GPUs reach each other's memory, the size follows from the number of ranks",
    )
    cuda_in_place_bytes: int = _number(
        "C10D_CUSTOM_CUDA_IN_PLACE_BYTES",
        512 << 10,
        0,
        1 << 34,
        "above, collectives of ranks that all share a GPU are one kernel, which reads and writes the tensors where "
        "they lie (all_reduce, broadcast, all_gather and reduce_scatter, where the ranks' trial of it went well)",
    )
    cuda_host_bytes: int = _number(
        "C10D_CUSTOM_CUDA_HOST_BYTES",
        2 << 20,
        0,
        1 << 34,
        "largest collective of CUDA tensors (bytes of a rank's inputs or outputs) that ranks which share a GPU take "
        "through host memory, where they need not wait for their turns on the GPU; under MPS, a 32nd of it",
    )
    trace: int = _number(
        "C10D_CUSTOM_TRACE",
        256,
        0,
        1 << 20,
        "how many of its last collectives, and of its last messages, each rank of a group remembers",
    )
    trace_dir: str = _text(
        "C10D_CUSTOM_TRACE_DIR",
        "folder into which a rank writes what it remembers when a group fails (docs/debugging.md)",
    )
    trace_signal: int = _number(
        "C10D_CUSTOM_TRACE_SIGNAL",
        0,
        0,
        64,
        "number of a signal on which a process writes it, too, and goes on (10 is SIGUSR1; 0: none)",
    )
    trace_frames: int = _number(
        "C10D_CUSTOM_TRACE_FRAMES",
        0,
        0,
        1,
        "1: remember from where in the program each call was made, for the files of TORCH_FR_DUMP_TEMP_FILE; 0: of the "
        "call that failed only",
    )

    def __init__(self, **values: int | str) -> None:
        """Takes the defaults, but for the settings named. TypeError for a setting that there is not."""
        if unknown := values.keys() - SETTINGS.keys():
            raise TypeError(f"no such settings: {', '.join(sorted(unknown))}")
        for name, setting in SETTINGS.items():
            setattr(self, name, values.get(name, setting.default))

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> Config:
        """What this process's environment says. ValueError, which begins with the variable's name, for a value that it
        cannot have."""
        config = cls()
        for name, setting in SETTINGS.items():
            if (text := environ.get(setting.variable)) is not None:
                setattr(config, name, setting.value(text))
        if config.cool:
            config.spin_us = 0
        if config.block_bytes % 4096:
            raise ValueError(f"C10D_CUSTOM_BLOCK_BYTES={config.block_bytes}: must be a multiple of 4096")
        if config.cuda_staging_bytes % 65536:
            raise ValueError(f"C10D_CUSTOM_CUDA_STAGING_BYTES={config.cuda_staging_bytes}: must be a multiple of 65536")
        if config.trace_signal and not (config.trace_dir or flight_recorder_file()):
            raise ValueError(
                "C10D_CUSTOM_TRACE_SIGNAL needs C10D_CUSTOM_TRACE_DIR, a folder to write to, or TORCH_FR_DUMP_TEMP_FILE"
            )
        if config.trace_signal and config.trace_signal not in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            raise ValueError(f"C10D_CUSTOM_TRACE_SIGNAL={config.trace_signal}: no signal that a process can handle")
        for variable in _RECORDERS_SIZE:  # torch itself, which reads the first that is set, would not name it
            if text := environ.get(variable):
                try:
                    int(text)
                except ValueError:
                    raise ValueError(f"{variable}={text}: is no whole number") from None
                break
        return config


_RECORDERS_SIZE = "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"

# In the order of docs/configuration.md.
SETTINGS = {name: setting for name, setting in vars(Config).items() if isinstance(setting, _Setting)}


def restart_attempt() -> int:
    """How often torchrun has restarted the job, where all ranks agree on that without asking each other
    (creation/bounded_store.py): 0 without torchrun, and where it has an agent on each of several hosts, each of which
    leaves out the restarts that another's failure has caused. ValueError where torchrun's variable is no number."""
    count = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return count if os.environ.get("GROUP_WORLD_SIZE", "1") == "1" else 0


def _torchs(*names: str) -> str:
    """The value of a variable of torch's, by its name or its older one."""
    return next((value for name in names if (value := os.environ.get(name))), "")


def flight_recorder_file() -> str:
    """What the names of files in the Flight Recorder's format begin with; "" where the user has named none, or turned
    that recorder off."""
    off = _torchs(*_RECORDERS_SIZE) == "0"
    return "" if off else _torchs("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


def flight_recorder_on_failure() -> bool:
    """Returns whether torch's file of a trace is written when a group fails."""
    said = _torchs("TORCH_FR_DUMP_ON_TIMEOUT", "TORCH_NCCL_DUMP_ON_TIMEOUT")
    return said.lower() not in ("0", "n", "no", "f", "false")


def traced(config: Config) -> bool:
    """Whether anything asks for a file of what ranks remember of their calls, or for the stacks in it."""
    return bool(config.trace_dir or config.trace_signal or config.trace_frames or flight_recorder_file())


def launcher_wanted() -> bool:
    """`Config.launcher`, for `import torch`: there no variable's value may raise."""
    return os.environ.get("C10D_CUSTOM_LAUNCHER", "1") != "0"


def replaced_wanted() -> list[str]:
    """`Config.replaces`, for `import torch`."""
    return [name for name in REPLACEABLE if os.environ.get("C10D_CUSTOM_REPLACES") == name]


def table() -> list[tuple[str, Any, str]]:
    """(variable, default or "none", what it says) of each."""
    return [(s.variable, "none" if s.default == "" else s.default, s.doc) for s in SETTINGS.values()]
