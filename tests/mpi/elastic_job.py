"""An elastic job of torchrun over a rig's hosts, an agent on each, and what one can do to it and see of it.

Vocabulary. An *agent* is one host's torchrun; its children are *workers*, which run scripts/steps_on.py. The workers
that are alive at a time are a *generation*; it is *up* when each has finished a step."""

import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from harness.marks import MARK, kill_marked, marked
from programs.launch import LAUNCHER_VARIABLES

STEPS_ON = Path(__file__).with_name("scripts") / "steps_on.py"
HUNG = 120.0  # s


@dataclass(frozen=True)
class Worker:
    host: str
    pid: int  # the machine's
    said_as: str  # its file's name: the host, and its process id there
    rank: int


class ElasticJob:
    """Context: at its end nothing of the job is left."""

    def __init__(self, hosts, folder, flags=(), per_host=2, timeout=20.0, variables=None):
        """``timeout``: of the groups; ``flags``: torchrun's."""
        self.hosts, self.folder, self.per_host, self._timeout = hosts, Path(folder), per_host, timeout
        self.mark, self._flags, self._variables = uuid.uuid4().hex, list(flags), variables or {}
        self._agents, self._networks = {}, {}
        (self.folder / "said").mkdir(parents=True)
        for name in hosts.names:
            self._networks[os.readlink(f"/proc/{hosts.process(name)}/ns/net")] = name
        self._endpoint = f"{hosts.addresses[hosts.names[0]]}:{random.randrange(20000, 30000)}"
        self.files_before = self.shared_memory()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        kill_marked(self.mark)
        for agent in self._agents.values():
            agent.wait()

    # --- what one can do

    def serve_rendezvous(self):
        """On the login host, where it outlives any host."""
        port = int(self._endpoint.rpartition(":")[2])
        self._endpoint = f"{self.hosts.login_address}:{port}"
        serve = f"""
import time
from torch.distributed import TCPStore
store = TCPStore("0.0.0.0", {port}, None, True, wait_for_workers=False)
while True: time.sleep(60)
"""
        self._agents[None] = self._start(None, [sys.executable, "-c", serve], "store")

    def start_agent(self, host):
        command = [
            *(sys.executable, "-m", "torch.distributed.run", *self._flags),
            *("--nproc-per-node", self.per_host, "--rdzv-backend", "c10d", "--rdzv-id", "elastic"),
            *("--rdzv-endpoint", self._endpoint, "--no-python"),
            *(sys.executable, STEPS_ON, self.folder, self._timeout),
        ]
        self._agents[host] = self._start(host, command, host)

    def _start(self, host, command, name):
        environment = {
            k: v for k, v in os.environ.items() if k not in LAUNCHER_VARIABLES and not k.startswith("TORCHELASTIC")
        }
        environment.update({MARK: self.mark, "OMP_NUM_THREADS": "1", **self._variables})
        with open(self.folder / f"output.{name}", "ab") as output:
            return subprocess.Popen(
                self.hosts.command(host, command),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def kill(self, workers):
        """The moment."""
        now = time.monotonic()
        for worker in workers:
            os.kill(worker.pid, signal.SIGKILL)
        return now

    def kill_agent(self, host, workers=False):
        """The host's torchrun, and with it its workers or not. The moment."""
        found = [pid for pid, there, _ in self._processes() if there == host]
        own = {worker.pid for worker in self.workers()}
        now = time.monotonic()
        for pid in found:
            if workers or pid not in own:
                os.kill(pid, signal.SIGKILL)
        return now

    def stop(self):
        (self.folder / "stop").write_text("")

    # --- what one can see

    def _processes(self):
        """(pid, host, environment) of all of the job on the hosts."""
        for pid in marked(self.mark):
            try:
                host = self._networks.get(os.readlink(f"/proc/{pid}/ns/net"))
                environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
            except OSError:
                continue
            if host is not None and not command.startswith(b"nsenter\0"):
                yield pid, host, dict(os.fsdecode(v).partition("=")[::2] for v in environment)

    def workers(self):
        """Those that are alive."""
        found = []
        for pid, host, environment in self._processes():
            if "TORCHELASTIC_RUN_ID" not in environment:
                continue
            try:
                status = Path(f"/proc/{pid}/status").read_text()
            except OSError:
                continue
            inside = next(line.split()[-1] for line in status.splitlines() if line.startswith("NSpid:"))
            found.append(Worker(host, pid, f"{host}-{inside}", int(environment["RANK"])))
        return sorted(found, key=lambda worker: worker.rank)

    def said(self, worker, event):
        """What a worker has said of it, or None."""
        try:
            text = (self.folder / "said" / worker.said_as).read_text()
        except FileNotFoundError:
            return None
        lines = [json.loads(line) for line in text.splitlines(True) if line.endswith("\n")]
        return next((line for line in lines if line["event"] == event), None)

    def all_said(self, event):
        """By any worker so far."""
        lines = [line for path in (self.folder / "said").iterdir() for line in path.read_text().splitlines()]
        return [said for said in map(json.loads, lines) if said["event"] == event]

    def up(self, size, but=()):
        """The generation of ``size`` workers, none of ``but``, once it is up."""

        def there():
            found = self.workers()
            if len(found) == size and not set(found) & set(but) and all(self.said(w, "up") for w in found):
                return found
            return None

        return self.wait(there, f"{size} workers that have finished a step")

    def errors(self, workers):
        """{worker: what it said} of those that raised, once all have ended."""
        pids = {worker.pid for worker in workers}
        self.wait(lambda: not pids & {worker.pid for worker in self.workers()}, f"the end of {workers}")
        return {worker: said for worker in workers if (said := self.said(worker, "error"))}

    def agent_ended(self, host):
        """Its exit code."""
        self.wait(lambda: self._agents[host].poll() is not None, f"the end of {host}'s agent")
        return self._agents[host].returncode

    def wait(self, there, what, seconds=HUNG):
        until = time.monotonic() + seconds
        while not (found := there()):
            assert time.monotonic() < until, f"not there after {seconds:.0f} s: {what}\n{self}"
            time.sleep(0.1)
        return found

    def shared_memory(self):
        """{(host, file)} in /dev/shm."""
        return {
            (name, file)
            for name in self.hosts.names
            for file in os.listdir(f"/proc/{self.hosts.process(name)}/root/dev/shm")
        }

    def left_over(self):
        """Processes and files on the hosts, once the job has ended."""
        processes = [(pid, host) for pid, host, _ in self._processes()]
        return processes, self.shared_memory() - self.files_before

    def __str__(self):
        said = [f"--- {path.name}\n{path.read_text()}" for path in sorted((self.folder / "said").iterdir())]
        output = [f"--- {path.name}\n{path.read_text()[-8000:]}" for path in sorted(self.folder.glob("output.*"))]
        return "\n".join([f"alive: {self.workers()}", *said[-12:], *output])
