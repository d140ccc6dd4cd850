"""What is timed: a c10d backend, or raw MPI.

A reference has a method for each operation in operations.py; it binds the operation to its tensors and
returns the function to be timed, which takes nothing.
"""
import os
import sys

import torch.distributed as dist


class Unavailable(Exception):
    """This reference cannot be timed here; the message says why, and what would help."""


class Backend:
    """A c10d backend, over all ranks."""

    def __init__(self, group):
        self.group = group
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def barrier(self):
        dist.barrier(self.group)

    def all_reduce(self, source, target):
        return lambda: dist.all_reduce(target, group=self.group)

    def all_reduce_async(self, source, target):
        return lambda: dist.all_reduce(target, group=self.group, async_op=True).wait()

    def broadcast(self, source, target):
        return lambda: dist.broadcast(target, group=self.group, group_src=0)

    def reduce(self, source, target):
        return lambda: dist.reduce(target, group=self.group, group_dst=0)

    def all_gather(self, source, target):
        return lambda: dist.all_gather_into_tensor(target, source, group=self.group)

    def reduce_scatter(self, source, target):
        return lambda: dist.reduce_scatter_tensor(target, source, group=self.group)

    def all_to_all(self, source, target):
        return lambda: dist.all_to_all_single(target, source, group=self.group)

    def gather(self, source, target):
        parts = None if target is None else list(target.chunk(self.size))
        return lambda: dist.gather(source, parts, group=self.group, group_dst=0)

    def scatter(self, source, target):
        parts = None if source is None else list(source.chunk(self.size))
        return lambda: dist.scatter(target, parts, group=self.group, group_src=0)

    def send_recv(self, source, target):
        last = self.size - 1

        def first_rank():
            dist.send(target, group=self.group, group_dst=last)
            dist.recv(target, group=self.group, group_src=last)

        def last_rank():
            dist.recv(target, group=self.group, group_src=0)
            dist.send(target, group=self.group, group_dst=0)
        return {0: first_rank, last: last_rank}.get(self.rank, lambda: None)


class RawMpi:
    """MPI's own collectives on the tensors' memory, by mpi4py: one flat communicator of all ranks, in rank order."""

    def __init__(self):
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py found no MPI library
            raise Unavailable(f"raw MPI needs mpi4py and an MPI library (pip install mpi4py mpich): {error}") from error
        if not MPI.Is_initialized():
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
        if MPI.COMM_WORLD.size != dist.get_world_size():
            raise Unavailable(f"MPI counts {MPI.COMM_WORLD.size} ranks where this job has {dist.get_world_size()}: is mpirun "
                              f"that of the library mpi4py found, {mpi_version()}?")
        self.MPI, self.comm = MPI, MPI.COMM_WORLD.Split(0, dist.get_rank())

    def barrier(self):
        self.comm.Barrier()

    def all_reduce(self, source, target):
        t, comm, in_place = target.numpy(), self.comm, self.MPI.IN_PLACE
        return lambda: comm.Allreduce(in_place, t)

    def all_reduce_async(self, source, target):
        t, comm, in_place = target.numpy(), self.comm, self.MPI.IN_PLACE
        return lambda: comm.Iallreduce(in_place, t).Wait()

    def broadcast(self, source, target):
        t, comm = target.numpy(), self.comm
        return lambda: comm.Bcast(t)

    def reduce(self, source, target):
        t, comm = target.numpy(), self.comm
        if comm.rank:
            return lambda: comm.Reduce(t, None)
        in_place = self.MPI.IN_PLACE
        return lambda: comm.Reduce(in_place, t)

    def all_gather(self, source, target):
        s, t, comm = source.numpy(), target.numpy(), self.comm
        return lambda: comm.Allgather(s, t)

    def reduce_scatter(self, source, target):
        s, t, comm = source.numpy(), target.numpy(), self.comm
        return lambda: comm.Reduce_scatter_block(s, t)

    def all_to_all(self, source, target):
        s, t, comm = source.numpy(), target.numpy(), self.comm
        return lambda: comm.Alltoall(s, t)

    def gather(self, source, target):
        s, t, comm = source.numpy(), None if target is None else target.numpy(), self.comm
        return lambda: comm.Gather(s, t)

    def scatter(self, source, target):
        s, t, comm = None if source is None else source.numpy(), target.numpy(), self.comm
        return lambda: comm.Scatter(s, t)

    def send_recv(self, source, target):
        t, comm, last = target.numpy(), self.comm, self.comm.size - 1

        def first_rank():
            comm.Send(t, last)
            comm.Recv(t, last)

        def last_rank():
            comm.Recv(t, 0)
            comm.Send(t, 0)
        return {0: first_rank, last: last_rank}.get(comm.rank, lambda: None)


def mpi_version():
    """"MPICH 5.0.2", of the MPI library in this process, whoever loaded it; None without one."""
    MPI = getattr(sys.modules.get("mpi4py"), "MPI", None)
    if MPI is None:
        return None
    vendor, version = MPI.get_vendor()
    return f"{vendor} {'.'.join(map(str, version))}"


def known(name):
    return name == "mpi" or dist.is_backend_available(name)


def make(names, hosts):
    """{name: reference} of custom, the default group, and ``names``, on ranks over so many hosts."""
    references = {"custom": Backend(dist.group.WORLD)}
    for name in names:
        references[name] = RawMpi() if name == "mpi" else Backend(_group(name, hosts))
    return references


def _group(name, hosts):
    if name == "gloo" and hosts == 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        return dist.new_group(backend=name)
    except (RuntimeError, ValueError) as error:
        hint = ("; over several hosts gloo needs GLOO_SOCKET_IFNAME, the network interface that reaches the others"
                if name == "gloo" and hosts > 1 and "GLOO_SOCKET_IFNAME" not in os.environ else "")
        raise Unavailable(f"no group of the backend {name!r}: {error}{hint}") from error
