"""Processes that are told, by lines on their standard input, which group to make (dist._reconfigure), and say what came
of it. `Workers` starts them; run as a program, this is one."""

import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

REFUSED = {"UsageError", "CollectiveMismatchError", "PeerLostError", "TransportError", "AbortedError"}


class Workers:
    """By name, a letter each. ``command``: of a host and what to run there, what to run here; ``python``: its MPI is
    that of the processes."""

    def __init__(self, command=lambda host, run: run, python=sys.executable):
        self._command, self._python, self._processes, self.handles = command, python, {}, {}
        self._uuid = random.randrange(1 << 40)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self._processes.values():
            process.kill()
            process.communicate()

    def start(self, names, hosts=None, seconds=60):
        """``hosts``: of each; None: this one."""
        for i, name in enumerate(names):
            self._processes[name] = subprocess.Popen(
                self._command(hosts[i] if hosts else None, [self._python, __file__, str(seconds)]),
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        for name in names:
            self.handles[name] = self.hear(name)["handle"]
        return self

    def process(self, name):
        return self._processes[name]

    def tell(self, name, what, **more):
        self._processes[name].stdin.write(json.dumps({"what": what, **more}) + "\n")
        self._processes[name].stdin.flush()

    def hear(self, name):
        process = self._processes[name]
        while not select.select([process.stdout], [], [], 1)[0]:
            process.send_signal(signal.SIGCONT)  # nsenter stops with what it has started, and is to see its end
        line = process.stdout.readline()
        assert line, f"{name} has ended with {process.wait(10)}"
        return json.loads(line)

    def ask(self, names, what, **more):
        for name in names:
            self.tell(name, what, **more)
        return {name: self.hear(name) for name in names}

    def uuid(self):
        self._uuid += 1
        return self._uuid

    def given(self, names):
        return [self.handles[name] for name in names]

    def named(self, name):
        """What errors call it."""
        return self.handles[name].rpartition(":")[0]

    def regroup(self, names, ordered=True, seconds=60, callers=None, uuid=None):
        """What the ``callers`` (all of ``names``) say that came of it."""
        return self.ask(
            callers or names,
            "regroup",
            uuid=uuid or self.uuid(),
            handles=self.given(names),
            ordered=ordered,
            seconds=seconds,
        )

    def require_group(self, names, ordered=True):
        """These make a group, and it is right."""
        said = self.regroup(names, ordered)
        assert all("error" not in value for value in said.values()), said
        ranks = {name: value["rank"] for name, value in said.items()}
        assert sorted(ranks.values()) == list(range(len(names))), said
        if ordered:
            assert ranks == {name: rank for rank, name in enumerate(names)}, said
        for name, value in self.ask(names, "use").items():
            assert value == right(ranks[name], len(names)), (name, value)
        return ranks

    def kill(self, *names):
        for name in names:
            self.tell(name, "die")
        for name in names:
            self._processes.pop(name).wait(30)

    def end(self, *names):
        names = names or list(self._processes)
        assert self.ask(names, "end") == dict.fromkeys(names, {"ended": True})
        for name in names:
            assert self._processes.pop(name).wait(60) == 0, name


def right(rank, size):
    """What `used` says on that rank of so many."""
    return {
        "rank": [rank, size, rank, size],
        "sums": [True] * 3,
        "message": [(rank - 1) % size],
        "gathered": list(range(size)),
        "turned": list(range(size)),
        "gradient": [float(size * (size + 1))],
        "functional": list(range(size)),
        "dtensor": float(sum(range(2 * size))),
    }


def used():
    from torch.distributed import _functional_collectives as functional
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.nn.parallel import DistributedDataParallel

    rank, size = dist.get_rank(), dist.get_world_size()
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    said = {"rank": [rank, size, backend.rank(), backend.size()], "sums": []}
    for count in (3, 3000, 300_000):
        x = torch.arange(count, dtype=torch.float32) * (rank + 1)
        dist.all_reduce(x)
        said["sums"].append(bool((x == torch.arange(count) * (size * (size + 1) // 2)).all()))
    got = torch.full((70_000,), -1)
    for work in [dist.isend(torch.full((70_000,), rank), (rank + 1) % size), dist.irecv(got, (rank - 1) % size)]:
        work.wait()
    said["message"] = got.unique().tolist()
    gathered = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(gathered, torch.tensor([rank]))
    said["gathered"] = torch.cat(gathered).tolist()
    turned, told = dist.new_group(list(reversed(range(size)))), [None] * size
    dist.all_gather_object(told, dist.get_rank(turned), group=turned)
    said["turned"] = told
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(5, 3))
    model(torch.full((2, 5), size * (rank + 1.0))).sum().backward()  # what the average divides is a multiple of `size`
    said["gradient"] = model.module.weight.grad.unique().tolist()
    one = torch.tensor([rank])
    said["functional"] = (functional.all_gather_single(one, 0, dist.group.WORLD) + 0).tolist()
    mesh = dist.device_mesh.init_device_mesh("cpu", (size,))
    said["dtensor"] = distribute_tensor(torch.arange(2.0 * size), mesh, [Shard(0)]).sum().full_tensor().item()
    return said


def make():
    """Objects that rest on the default group."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.nn.parallel import DistributedDataParallel

    size = dist.get_world_size()
    mesh = dist.device_mesh.init_device_mesh("cpu", (size,))
    return {
        "new_group": dist.new_group(list(range(size))),
        "mesh": mesh.get_group(),
        "dtensor": distribute_tensor(torch.arange(2.0 * size), mesh, [Shard(0)]),
        "fsdp": fully_shard(torch.nn.Linear(4, 2), mesh=mesh),
        "ddp": DistributedDataParallel(torch.nn.Linear(4, 2)),
    }


def tried(made):
    """What comes of each."""

    def use(what):
        if isinstance(what, dist.ProcessGroup):
            x = torch.ones(1)
            dist.all_reduce(x, group=what)
            return {"sum": x.item()}
        if isinstance(what, torch.nn.Module):
            what.zero_grad()
            what(torch.full((1, 4), dist.get_rank() + 1.0)).sum().backward()
            gradient = next(what.parameters()).grad
            return {"gradient": getattr(gradient, "full_tensor", lambda: gradient)().unique().tolist()}
        return {"whole": what.full_tensor().tolist()}

    def act(what):
        try:
            return use(what)
        except Exception as error:
            return {"error": type(error).__name__}

    return {name: act(what) for name, what in made.items()}


def outcome(act):
    began = time.monotonic()
    try:
        said = act() or {}
    except Exception as error:
        said = {"error": type(error).__name__, "text": str(error)}
    return {**said, "seconds": time.monotonic() - began}


def regroup(uuid, handles, ordered, seconds):
    def act():
        given = handles if ordered else set(handles)
        dist._reconfigure(uuid, given, timeout=timedelta(seconds=seconds)).wait()
        return {"rank": dist.get_rank(), "size": dist.get_world_size()}

    return outcome(act)


def work(seed, steps):
    """Random operations, each with what it must give; the same on all ranks."""

    def act():
        from steps import one_step

        rng = random.Random(seed)
        for step in range(steps):
            if wrong := one_step(rng, step):
                return {"wrong": wrong}

    return outcome(act)


def shrink(seconds):
    def act():
        import c10d_custom

        c10d_custom.shrink_group(timedelta(seconds=seconds))
        return {"rank": dist.get_rank(), "size": dist.get_world_size()}

    return outcome(act)


def held():
    """By the default group and this package."""
    from belongings import belongings

    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    time.sleep(1.2)  # threads that nobody needs end then
    return belongings()


def serve(commands, answers, seconds):
    """One worker's life."""

    def say(values):
        answers.write(json.dumps(values) + "\n")
        answers.flush()

    alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1, "timeout": timedelta(seconds=seconds)}
    dist.init_process_group("custom", enable_reconfigure=True, **alone)
    say({"handle": dist._get_reconfigure_handle()})
    made = {}
    for line in commands:
        command = json.loads(line)
        what = command.pop("what")
        if what == "end":
            break
        if what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif what == "regroup":
            say(regroup(**command))
        elif what == "use":
            say(used())
        elif what == "make":
            made = make()
            say({"made": list(made)})
        elif what == "try":
            say(tried(made))
        elif what == "reduce":
            say(outcome(lambda: dist.all_reduce(torch.ones(5))))
        else:
            say({"work": work, "shrink": shrink, "held": held}[what](**command))
    dist.destroy_process_group()
    say({"ended": True})


def main():
    serve(sys.stdin, sys.stdout, float(sys.argv[1]))


if __name__ == "__main__":
    main()
