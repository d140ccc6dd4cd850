"""Ranks as processes of this machine, forked by a server that has imported torch, with what DDP, optimizers and meshes
import of it as they are made, and nothing of ours: importing it takes longer than most tests, and its memory is shared
that way."""

import ctypes
import multiprocessing
import os
import signal

PR_SET_PDEATHSIG = 1


class SpawnedRanks:
    """target(rank, world_size, connection, *args) in so many processes.

    processes and connections are lists by rank; a dead rank's connection reads as end of file.
    """

    def __init__(self, world_size, target, args):
        self.processes, self.connections = [], []
        forkserver = multiprocessing.get_context("forkserver")
        forkserver.set_forkserver_preload(["torch.distributed", "torch._dynamo.config", "torch.distributed.checkpoint"])
        for rank in range(world_size):
            ours, theirs = forkserver.Pipe()
            process = forkserver.Process(
                target=_main,
                name=f"rank{rank}of{world_size}",
                daemon=True,
                args=(dict(os.environ), target, rank, world_size, theirs, args),
            )
            process.start()
            theirs.close()
            self.processes.append(process)
            self.connections.append(ours)

    def kill(self):
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
            process.close()
        for connection in self.connections:
            connection.close()

    def last_words(self):
        """What the ranks' launcher wrote: there is none."""
        return ""


def die_with(parent):
    """Ask the kernel to kill this process with its parent, even one killed without a chance to clean up."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _main(environment, target, rank, world_size, connection, args):
    die_with(os.getppid())  # the server, which ends with the tests
    os.environ.clear()  # it is as old as the server
    os.environ.update(environment)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    target(rank, world_size, connection, *args)
