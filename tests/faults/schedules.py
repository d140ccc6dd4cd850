"""Random schedules of what happens to processes that make groups again and again (regrouping.py): they join, are killed
amid collectives and amid the making of a group, stop for a while or for too long, shrink their group, are left out.

Each step ends in a group in which all is right, or in errors on all that called, each of which names who is missing.
Run as a program, this forks workers, which then start in milliseconds."""

import contextlib
import gc
import json
import os
import random
import re
import select
import signal
import socket
import string
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

if __name__ == "__main__":
    # All that workers use: a DDP's making alone imports hundreds of modules.
    import belongings  # noqa: F401
    import steps  # noqa: F401
    import torch._dynamo.config
    import torch.distributed.fsdp
    import torch.distributed.tensor
    import torch.nn.parallel  # noqa: F401
    from regrouping import serve

    import c10d_custom  # noqa: F401
else:
    import pytest

    from .regrouping import REFUSED, Workers

    SEEDS = [0, 1, *(pytest.param(seed, marks=pytest.mark.full("as the first two")) for seed in range(2, 200))]

HANGS = 100.0  # s: far beyond any time-out of a schedule
MOST = 6
PATIENCE = 30.0  # s: of a regroup or shrink that is to succeed


class Hangs(Exception):
    """A worker, of that name."""


class Forked:
    """A worker; what Workers asks of a Popen."""

    def __init__(self, name, link, pool):
        self.name, self._link, self._pool, self._rest = name, link, pool, b""
        self.pid = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        self.stdin = link.makefile("w")

    def line(self):
        """The next that it says; an empty one once it has ended."""
        until = time.monotonic() + HANGS
        while b"\n" not in self._rest:
            if not select.select([self._link], [], [], max(until - time.monotonic(), 0))[0]:
                raise Hangs(self.name)
            try:
                data = self._link.recv(1 << 16)
            except ConnectionError:
                data = b""
            if not data:
                return ""
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode()

    def send_signal(self, number):
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def wait(self, seconds=60):
        try:
            return self._pool.status(self.name, seconds)
        except Hangs:
            self.send_signal(signal.SIGABRT)  # which has it write its stacks
            self._pool.status(self.name, 10)
            pytest.fail(f"{self.name} does not end\n{self._pool.errors(self.name)}")

    def communicate(self):
        self._link.close()


class Pool(Workers if __name__ != "__main__" else object):
    """Workers forked on each of ``hosts``."""

    def __init__(self, hosts=(None,), command=lambda host, run: run):
        super().__init__()
        self.hosts, self._folder, self._ended = hosts, tempfile.TemporaryDirectory(), {}
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(path := f"{self._folder.name}/door")
        self._server.listen()
        quiet = {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        self._parents = {
            host: subprocess.Popen(
                command(host, [sys.executable, __file__, path]),
                env={**os.environ, **quiet},
                bufsize=0,  # select sees the pipe alone, not what has been read of it
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for host in hosts
        }

    def __exit__(self, *_):
        super().__exit__()
        self._processes.clear()
        for parent in self._parents.values():
            parent.stdin.close()
            parent.wait(60)
            parent.stdout.close()
        self._server.close()
        self._folder.cleanup()

    def start(self, names, hosts=None, seconds=60):
        for i, name in enumerate(names):
            parent = self._parents[hosts[i] if hosts else self.hosts[0]]
            parent.stdin.write(f"{name}\n".encode())
            parent.stdin.flush()
            self._server.settimeout(HANGS)
            link, _ = self._server.accept()
            self._processes[name] = Forked(name, link, self)
            self.handles[name] = self.hear(name)["handle"]
        return self

    def hear(self, name):
        try:
            line = self._processes[name].line()
        except Hangs:
            pytest.fail(f"{name} hangs; load {os.getloadavg()[0]:.0f}\n{self.drop(signal.SIGABRT, signal.SIGCONT)}")
        if not line:
            del self._processes[name]
            pytest.fail(f"{name} has ended with {self.status(name, 10)}\n{self.errors(name)}")
        return json.loads(line)

    def errors(self, name):
        """What that worker has written to its stderr."""
        return f"--- {name}\n{Path(self._folder.name, name).read_text()}"

    def drop(self, *signals):
        """All workers, whose end that is. What they have written."""
        names = list(self._processes)
        for name in names:
            for number in signals:
                self._processes[name].send_signal(number)
        for name in names:
            self._processes.pop(name).wait()
        return "\n".join(map(self.errors, names))

    def forget(self, name):
        """It has been killed."""
        status = self._processes.pop(name).wait()
        assert status == -signal.SIGKILL, (name, status)

    def status(self, name, seconds):
        until = time.monotonic() + seconds
        while name not in self._ended:
            outs = [parent.stdout for parent in self._parents.values()]
            ready, _, _ = select.select(outs, [], [], max(until - time.monotonic(), 0))
            if not ready:
                raise Hangs(name)
            for out in ready:
                who, status = json.loads(out.readline())
                self._ended[who] = status
        return self._ended.pop(name)


class Schedule:
    """One, drawn from ``seed``. ``founders``: those for which MPI was started; a group of several hosts is of them."""

    def __init__(self, pool, seed):
        self.pool, self.rng = pool, random.Random(seed)
        self._names = (f"{letter}{seed}" for letter in string.ascii_letters)
        self.host, self.group = {}, []  # of each that is alive; the group's members in the order of ranks

    def run(self, turns):
        try:
            self._run(turns)
        except BaseException:
            self.pool.drop(signal.SIGKILL)
            raise

    def _run(self, turns):
        for i in range(self.rng.randint(2, MOST)):
            self._start(self.pool.hosts[i % len(self.pool.hosts)])
        self.founders = set(self.host)
        self.require_group(self._shuffled(self.host))
        one_host = len(self.pool.hosts) == 1
        before = self._held() if one_host else None
        for _ in range(turns):
            if len(self.group) < 2:
                self._grow()  # so each step begins with two
            self.rng.choice(
                (
                    self.regroup,
                    self.join,
                    self.work,
                    self.kill_at_work,
                    self.kill_while_regrouping,
                    self.kill_while_shrinking,
                    self.stop_for_a_while,
                    self.stop_for_too_long,
                )
            )()
        if before is not None:
            for held in before.values():
                # Each keeps a connection to the last member whose store served it: its own, and the others' to it.
                held["descriptors"] += MOST
            # A call of a stopped process's store ends some seconds later.
            for _ in range(5):
                after = self._held()
                more = [n for n in before.keys() & after.keys() if any(after[n][w] > h for w, h in before[n].items())]
                if not more:
                    break
            assert not more, (more, before, after)
        self.pool.end(*self.host)

    # --- steps

    def regroup(self):
        self.require_group(self._some())

    def join(self):
        if len(self.host) < MOST:
            self._start(self.rng.choice(self.pool.hosts))
        self._grow()

    def work(self):
        self._require_well(self._working(40))

    def stop_for_a_while(self):
        """The others wait for it, and nothing fails."""
        victim = self.rng.choice(self.group)
        hear = self._working(200)
        self._pause(0.1)
        self.pool.process(victim).send_signal(signal.SIGSTOP)
        self._pause(0.5)
        self.pool.process(victim).send_signal(signal.SIGCONT)
        self._require_well(hear)

    def stop_for_too_long(self):
        members = self._some(2)
        victim = self.rng.choice(members)
        self.pool.process(victim).send_signal(signal.SIGSTOP)
        self._told_to_regroup(members, seconds=2.0)
        for name in members:
            if name != victim:
                said = self.pool.hear(name)
                assert said["error"] == "TransportError" and said["seconds"] < 20, said
                assert self.pool.named(victim) in said["text"].partition("Not known to have come")[2], (victim, said)
        self.pool.process(victim).send_signal(signal.SIGCONT)
        assert self.pool.hear(victim)["error"] in REFUSED
        self.require_group(members)

    def kill_at_work(self):
        self._lose_one_at_work()
        self.require_group(self._within(self.group))

    def kill_while_regrouping(self):
        members = self._some(2)
        victim = self.rng.choice(members)
        comes = self.rng.random() < 0.7
        # Of a process on another host nobody knows that it has ended: it is waited for.
        seconds = PATIENCE if len({self.host[name] for name in members}) == 1 else 6.0
        self._told_to_regroup([name for name in members if comes or name != victim], seconds)
        self._pause(0.05)
        self._kill(victim)
        for name in members:
            if name != victim:
                said = self.pool.hear(name)
                assert said.get("error", "PeerLostError") in REFUSED and said["seconds"] < 20, said
                assert "error" not in said or self.pool.named(victim) in said["text"], (victim, said)
        self.require_group([name for name in members if name != victim])

    def kill_while_shrinking(self):
        """Or none."""
        self._lose_one_at_work()
        for name in self.group:
            self.pool.tell(name, "shrink", seconds=PATIENCE)
        if len(self.group) > 1 and self.rng.random() < 0.5:
            self._pause(0.02)
            victim = self.rng.choice(self.group)
            host = self.host[victim]
            self._kill(victim)
            said = {name: self.pool.hear(name) for name in self.group}
            others_hosts = {self.host[name] for name in self.group}
            if host not in others_hosts and all("does not prove" in value.get("text", "") for value in said.values()):
                # It died with news unread, or was connected to the dead only: docs/recovery.md, Who counts as gone.
                return self.require_group(self.group)
            assert all("error" not in value for value in said.values()), said
            sizes = {value["size"] for value in said.values()}
            assert sizes <= {len(self.group), len(self.group) + 1} and len(sizes) == 1, (victim, said)
            if sizes != {len(self.group)}:  # it was lost when the others had made their group
                for name, value in self.pool.ask(self.group, "shrink", seconds=PATIENCE).items():
                    said[name] = value
        else:
            said = {name: self.pool.hear(name) for name in self.group}
        right = [(rank, len(self.group)) for rank in range(len(self.group))]
        assert [(said[name].get("rank"), said[name].get("size")) for name in self.group] == right, said
        self.work()

    # --- what they are made of

    def require_group(self, members):
        ranks = self.pool.require_group(members, ordered=self.rng.random() < 0.5)
        self.group = sorted(ranks, key=ranks.__getitem__)

    def _start(self, host):
        name = next(self._names)
        self.pool.start([name], [host])
        self.host[name] = host

    def _grow(self):
        """A group of two at least."""
        members = self._within(self._shuffled(self.host))
        if len(members) < 2:
            self._start(self.host[members[0]])
            members.append(list(self.host)[-1])
        self.require_group(members)

    def _some(self, least=1):
        """Members of a group that can be, of the present one at worst."""
        size = self.rng.randint(min(least, len(self.host)), len(self.host))
        members = self._within(self.rng.sample(sorted(self.host), size))
        return members if len(members) >= least else list(self.group)

    def _within(self, names):
        """Those of them that can be in one group: of several hosts, the founders only."""
        if len({self.host[name] for name in names}) == 1 or self.founders.issuperset(names):
            return list(names)
        if self.rng.random() < 0.5 and (rest := [name for name in names if name in self.founders]):
            return rest
        host = self.host[names[0]]
        return [name for name in names if self.host[name] == host]

    def _shuffled(self, names):
        return self.rng.sample(sorted(names), len(names))

    def _pause(self, most):
        time.sleep(self.rng.uniform(0, most))

    def _working(self, steps):
        seed = self.rng.random()
        for name in self.group:
            self.pool.tell(name, "work", seed=seed, steps=steps)
        return lambda: {name: self.pool.hear(name) for name in self.group}

    def _require_well(self, hear):
        said = hear()
        assert all(value.keys() == {"seconds"} for value in said.values()), said

    def _told_to_regroup(self, members, seconds):
        uuid, ordered, handles = self.pool.uuid(), self.rng.random() < 0.5, self.pool.given(members)
        for name in members:
            self.pool.tell(name, "regroup", uuid=uuid, handles=handles, ordered=ordered, seconds=seconds)

    def _kill(self, victim):
        self.pool.process(victim).kill()
        self.pool.forget(victim)
        del self.host[victim]
        if victim in self.group:
            self.group.remove(victim)

    def _lose_one_at_work(self):
        ranks = {name: rank for rank, name in enumerate(self.group)}
        victim = self.rng.choice(self.group)
        hear = self._working(1 << 30)
        self._pause(0.1)
        self._kill(victim)
        for name, said in hear().items():
            assert said.get("error") == "PeerLostError" and said["seconds"] < 20, (name, said)
            assert re.search(rf"\brank {ranks[victim]}\b", said["text"]), (victim, ranks, said)

    def _held(self):
        """By each, in a group of its own."""
        for name in self.host:
            self.pool.require_group([name])
        held = self.pool.ask(list(self.host), "held")
        self.require_group(self._shuffled(self.host))
        return held


def main(path):
    """Forks a worker for each line on standard input, which is its name, and says by what status it has ended."""
    running = {}  # pidfd -> (PID, name)
    waits = select.poll()
    waits.register(sys.stdin, select.POLLIN)
    commands = os.fdopen(0, "rb", buffering=0)
    gc.freeze()  # or each worker looks at all of that, and copies it, when it ends
    while True:
        for fd, _ in waits.poll():
            if fd in running:
                pid, name = running.pop(fd)
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                waits.unregister(fd)
                os.close(fd)
                print(json.dumps([name, status]), flush=True)
            elif name := commands.readline().decode().strip():
                if not (pid := os.fork()):
                    errors = os.open(Path(path).with_name(name), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                    os.dup2(errors, 2)
                    link = socket.socket(socket.AF_UNIX)
                    link.connect(path)
                    return serve(link.makefile("r"), link.makefile("w"), 60)
                running[descriptor := os.pidfd_open(pid)] = pid, name
                waits.register(descriptor, select.POLLIN)
            else:
                return


if __name__ == "__main__":
    main(Path(sys.argv[1]).as_posix())
