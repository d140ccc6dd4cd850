"""What a process of a probe has: a GPU, the other process, and somebody who listens to its answers."""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import os
import signal
import statistics
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from .gpu import Gpu

_PR_SET_PDEATHSIG = 1


class Participant:
    def __init__(self, gpu: Gpu, pipe: Connection, results: Connection, words: mmap.mmap) -> None:
        self.gpu, self.driver, self._pipe, self._results = gpu, gpu.driver, pipe, results
        self._words = (ctypes.c_uint32 * 16).from_buffer(words)

    def tell(self, key: str, answer: Any) -> None:
        """An answer, None being "never"; one told later takes its place."""
        self._results.send(("answer", key, answer))

    def remark(self, key: str, text: str) -> None:
        self._results.send(("remark", key, text))

    def say(self, what: Any = None) -> None:
        """To the other process, which hears it."""
        self._pipe.send(what)

    def hear(self) -> Any:
        return self._pipe.recv()

    # --- words in memory that both hosts see, for what a pipe would be too slow for

    def set(self, index: int, value: int) -> None:
        self._words[index] = value

    def await_word(self, index: int, value: int) -> None:
        while self._words[index] < value:
            time.sleep(0)

    def cost(self, key: str, call: Callable[[], object], stream: int, times: int = 200) -> None:
        """Tells the microseconds that a call takes the host: the median."""
        took = []
        for i in range(times):
            began = time.perf_counter()
            call()
            took.append(time.perf_counter() - began)
            if i % 20 == 0:
                self.gpu.settle(stream)
        self.tell(key, round(statistics.median(took) * 1e6, 3))


def main(
    role: Callable[[Participant], None], make: Callable[[], Gpu], pipe: Connection, results: Connection, words: str
) -> None:
    """A process of a probe, which does not outlive who started it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if (parent := multiprocessing.parent_process()) is not None and not parent.is_alive():
        os._exit(1)
    try:
        with open(words, "r+b") as f:
            shared = mmap.mmap(f.fileno(), 0)
        gpu = make()
        with gpu.driver.activate():
            gpu.prepare()
            role(Participant(gpu, pipe, results, shared))
        results.send(("over",))
    except EOFError:  # the other process has ended: it says why
        results.send(("over",))
    except BaseException as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
        results.send(("error", f"{text} ({os.path.basename(at.filename)}:{at.lineno})"))
    os._exit(0)  # CUDA's own ending may wait for what a probe has left hanging
