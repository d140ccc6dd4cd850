"""Run a command with a deadline, keep its output, leave none of its processes behind.

A command's processes are recognised by a mark in their environment. Process
groups alone do not do: torchrun puts each worker in a session of its own, and
a worker whose launcher was killed is nobody's child.
"""

import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid

from harness import Layout
from harness.job import end, launch
from harness.marks import MARK, kill_marked, marked

SCRIPTS = pathlib.Path(__file__).resolve().parent / "scripts"
AS_RANK = SCRIPTS.with_name("as_rank.py")

# The ranks of the programs that start ranks, each one's function: --job makes an MPI job of so many of them.
RANKS = {
    "init_processes": 2,
    "p2p_blocking": 2,
    "p2p_nonblocking": 2,
    "group_all_reduce": 2,
    "six_collectives": 4,
    "sgd_partitioned": 2,
    "ddp_basic": 2,
    "ddp_model_parallel": 4,
    "ddp_checkpoint": 2,
    "scatter_kwargs_streams": 2,
}

# Set by the launchers and read by init_process_group: what is left from an outer
# launcher must not reach a program that is to find its own way.
LAUNCHER_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)


class Result:
    def __init__(self, command, code, output, errors, seconds, left_over):
        self.command = command
        self.code = code
        self.output = output
        self.errors = errors
        self.seconds = seconds
        self.left_over = left_over

    def __str__(self):
        return (
            f"{' '.join(self.command)}\nexit code {self.code} after {self.seconds:.1f} s; "
            f"processes left over: {self.left_over or 'none'}\n"
            f"--- stdout\n{self.output}\n--- stderr\n{self.errors}"
        )

    def json_by_rank(self):
        """The JSON objects of the output that carry a rank, rank -> object."""
        found = {}
        for line in self.output.splitlines():
            # A launcher may put the lines of two ranks on one.
            while line.startswith("{"):
                value, end = json.JSONDecoder().raw_decode(line)
                line = line[end:].lstrip()
                if "rank" in value:
                    assert value["rank"] not in found, f"two JSON lines from rank {value['rank']}\n{self}"
                    found[value["rank"]] = value
        return found


def backend():
    """Read at each call: the suite's --backend may set it after this module was imported."""
    return os.environ.get("C10D_TEST_BACKEND", "custom")


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start(arguments, *, deadline=180, env=None, layout=None, address=True, program=sys.executable, flags=(), cwd=None):
    """Run python (or another program) with these arguments, or python on every rank of a job of that layout
    if given (``flags`` are its launcher's, and ``cwd`` does not count); a Result, whatever the exit code.

    address=False leaves it to the launcher to say where rank 0 is. Raises AssertionError, with all output so far,
    when the deadline passes.
    """
    mark = uuid.uuid4().hex
    command = [str(program), *map(str, arguments)]
    environment = {
        k: v for k, v in os.environ.items() if k not in LAUNCHER_VARIABLES and not k.startswith("TORCHELASTIC")
    }
    # Unbuffered, print writes a line in pieces, and those of two ranks mix.
    environment.pop("PYTHONUNBUFFERED", None)
    environment.update(
        {
            MARK: mark,
            "C10D_TEST_BACKEND": backend(),
            "MASTER_PORT": str(free_port()),
            "OMP_NUM_THREADS": "1",
            # A fatal signal or SIGABRT (sent at the deadline) prints Python stacks.
            "PYTHONFAULTHANDLER": "1",
        }
    )
    if not address:
        del environment["MASTER_PORT"]
    environment.update(env or {})
    began = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as out, tempfile.TemporaryFile("w+", errors="replace") as err:
        if layout:
            process = launch(layout, arguments, environment, flags, stdout=out, stderr=err)
        else:
            process = subprocess.Popen(
                command,
                stdout=out,
                stderr=err,
                stdin=subprocess.DEVNULL,
                env=environment,
                cwd=cwd,
                start_new_session=True,
            )
        late = False
        left_over = []
        try:
            process.wait(deadline)
            # A launcher may return a moment before its last child is gone.
            grace = time.monotonic() + 2
            while (left_over := marked(mark)) and time.monotonic() < grace:
                time.sleep(0.02)
        except subprocess.TimeoutExpired:
            late = True
            for pid in reversed(marked(mark)):
                # A job's launchers forward what ranks then print, and would end them without a word.
                with contextlib.suppress(OSError):
                    if not layout or "python" in os.path.basename(os.readlink(f"/proc/{pid}/exe")):
                        os.kill(pid, signal.SIGABRT)
            time.sleep(1)
        finally:
            if layout:
                end(process, mark)
            else:
                kill_marked(mark)
                process.wait()
        seconds = time.monotonic() - began
        out.seek(0)
        err.seek(0)
        result = Result(command, process.returncode, out.read(), err.read(), seconds, left_over)
    assert not late, f"no end after {deadline} s\n{result}"
    return result


def finish(arguments, **options):
    """As start, and the command must exit with 0 and leave no process behind."""
    result = start(arguments, **options)
    assert result.code == 0 and not result.left_over, str(result)
    return result


def script(name, *arguments, **options):
    layout = Layout.chosen()
    if layout and name in RANKS:
        return finish([AS_RANK, SCRIPTS / f"{name}.py", *arguments], layout=layout.of(RANKS[name]), **options)
    return finish([SCRIPTS / f"{name}.py", *arguments], **options)


def torchrun(launcher_arguments, name, *arguments, **options):
    return finish(["-m", "torch.distributed.run", *launcher_arguments, SCRIPTS / f"{name}.py", *arguments], **options)
