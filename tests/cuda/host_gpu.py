"""A GPU that ranks which are processes share, simulated (pytest --device simulated): what is queued is done when it is
queued, its memory is files in memory, which other processes map, and its fused kernels are those of backend/cuda,
compiled for the host. CPU tensors stand in for its tensors; they cannot be mapped, so nothing is done in place."""

import ctypes
import fcntl
import functools
import mmap
import os
import tempfile
from pathlib import Path

import host_kernels
from c10d_custom.transport.cuda import compiler
from fake_driver import FakeDriver
from fake_world import World
from thread_ranks import standing_in


def library():
    """Where the kernels are that most ask for: compiled by the first process that asks, in the folder that
    C10D_TEST_KERNELS names."""
    from gpu import one_gpu

    folder = Path(os.environ.get("C10D_TEST_KERNELS") or tempfile.mkdtemp(prefix="kernels-"))
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (path := folder / "kernels.so").exists():
            host_kernels.build(folder / "part.so", host_kernels.FUSED, one_gpu.PAIRS)
            (folder / "part.so").rename(path)
    return path


class _Kernels(host_kernels.HostKernels):
    """Fused ones are compiled: a block of two threads each, on all ranks, for who waits takes a core."""

    def __init__(self, gpu):
        super().__init__(ctypes.CDLL(str(library())), processors=1)
        self.reduce = gpu.reduce

    def _load(self, algorithm, dtype, redop):
        if hasattr(self._library, compiler.name_of(algorithm, dtype, redop)):
            return super()._load(algorithm, dtype, redop)
        with tempfile.TemporaryDirectory() as folder:
            other = host_kernels.build(Path(folder, "kernel.so"), [algorithm], [(dtype, redop)])
        return host_kernels.HostKernels(other)._load(algorithm, dtype, redop)

    def launch(self, function, stream, blocks, threads, arguments):
        super().launch(function, stream, 1, 2, arguments)


class HostGpu(FakeDriver):
    def __init__(self):
        world = World(laziness=0.0)
        world.wrong = _broken
        super().__init__(world, 0, process=os.getpid())
        self.identity = int.from_bytes(os.urandom(8), "little")
        self._memory = {}  # address -> (mapping, descriptor)

    def _enqueue(self, stream, op):
        self._stream(stream)
        if op.run is not None:
            op.run({})

    def _span(self, address, nbytes, what):
        return address, None

    @functools.cached_property
    def kernels(self):
        return _Kernels(self)

    def allocation_of(self, address):
        return None

    def allocate(self, nbytes):
        descriptor = os.memfd_create("gpu")
        os.ftruncate(descriptor, nbytes)
        return self._mapped(descriptor)

    def export_memory(self, address):
        return f"{self.process} {self._memory[address][1]}".ljust(64).encode()

    def open_memory(self, handle):
        process, descriptor = handle.decode().split()
        return self._mapped(os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR))

    def _mapped(self, descriptor):
        mapping = mmap.mmap(descriptor, 0)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        self._memory[address] = mapping, descriptor
        return address

    def free(self, address):
        mapping, descriptor = self._memory.pop(address)
        mapping.close()
        os.close(descriptor)

    close_memory = free


def _broken(text):
    raise AssertionError(text)


@functools.cache
def install():
    """In this process, from now on."""
    gpu = HostGpu()
    context = standing_in(lambda device: gpu)
    context.__enter__()
    return context
