"""The device that a rank's tensors are on: a GPU or, so that these tests can be tried without one, a simulated one
(tests/cuda/host_gpu.py), or the CPU.

These two have no streams here: `stream`, `event` and `busy` stand for nothing. What only a GPU can show
(that the host does not wait, say) is asked under `device.queues` alone.
"""

import contextlib
import functools
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist


@functools.cache
def device_of(kind):
    """This rank's device; ranks take the GPUs in turn."""
    if kind == "cuda":
        return Cuda(dist.get_rank() % torch.cuda.device_count())
    return Simulated() if kind == "simulated" else Cpu()


class Cuda:
    """``kernels``: whether fused kernels may serve its tensors."""

    kind, queues, kernels = "cuda", True, True

    def __init__(self, index):
        self.index, self.name = index, f"cuda:{index}"
        torch.cuda.set_device(index)
        self._cycles = None

    @property
    def ids(self):
        """What DistributedDataParallel takes as device_ids."""
        return [self.index]

    def put(self, tensor):
        return tensor.to(self.name)

    def stream(self):
        return torch.cuda.Stream(self.name)

    def on(self, stream):
        return torch.cuda.stream(stream)

    def current(self):
        return torch.cuda.current_stream(self.name)

    def synchronize(self):
        torch.cuda.synchronize(self.name)

    def idle(self):
        """Whether all that is queued on the current stream is over."""
        return self.current().query()

    def event(self):
        """An event recorded on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def elapsed(self, first, last):
        """Seconds from one event to another, both over."""
        return first.elapsed_time(last) / 1e3

    def busy(self, seconds):
        """Keep the current stream busy for about so long, by one thread that counts cycles."""
        if self._cycles is None:
            self.synchronize()
            started = time.monotonic()
            torch.cuda._sleep(50_000_000)
            self.synchronize()
            self._cycles = 50_000_000 / (time.monotonic() - started)
        torch.cuda._sleep(int(self._cycles * seconds))

    def free_bytes(self):
        self.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.index)[0]


class _Nothing:
    """A stream or an event where everything is over when the call returns."""

    def __init__(self):
        self.at = time.perf_counter()

    def synchronize(self):
        pass

    def wait_stream(self, stream):
        pass

    def wait_event(self, event):
        pass

    def query(self):
        return True


class Cpu:
    kind, name, queues, kernels, ids, index = "cpu", "cpu", False, False, None, None

    def put(self, tensor):
        return tensor.clone()

    def stream(self):
        return _Nothing()

    def on(self, stream):
        return contextlib.nullcontext()

    def current(self):
        return _Nothing()

    def synchronize(self):
        pass

    def idle(self):
        return True

    def event(self):
        return _Nothing()

    def elapsed(self, first, last):
        return last.at - first.at

    def busy(self, seconds):
        pass

    def free_bytes(self):
        return 0


class Simulated(Cpu):
    """All tensors of this process count as its GPU's from now on, and are the CPU's for torch."""

    kernels = True

    def __init__(self):
        sys.path.append(str(Path(__file__).resolve().parents[1] / "cuda"))
        import host_gpu

        host_gpu.install()
