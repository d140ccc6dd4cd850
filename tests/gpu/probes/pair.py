"""Two processes that talk through a pipe: what a probe of something between processes runs in.

A probe is a program: it prints what it found, and ends with 0 (works), 1 (does not) or 3 (could not be tried).
"""

import multiprocessing
import os
import signal
import sys
import traceback

NOT_RUN = 3


class Pair:
    """first(pipe) and second(pipe) in processes of their own; `finish` has what they returned."""

    def __init__(self, first, second):
        spawn = multiprocessing.get_context("spawn")
        ends, self._results, self.processes = spawn.Pipe(), [], []
        for function, end in zip((first, second), ends):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=_main, args=(function, end, theirs), daemon=True)
            process.start()
            self._results.append(ours)
            self.processes.append(process)
            theirs.close()
        for end in ends:
            end.close()

    def kill(self, index):
        os.kill(self.processes[index].pid, signal.SIGKILL)

    def result(self, index, seconds=20):
        """What that process's function returned; RuntimeError with its traceback, or that it gave no answer."""
        if not self._results[index].poll(seconds):
            raise RuntimeError(f"process {index} gave no answer within {seconds} s")
        try:
            fine, value = self._results[index].recv()
        except EOFError:
            raise RuntimeError(f"process {index} ended without an answer") from None
        if not fine:
            raise RuntimeError(f"process {index}:\n{value}")
        return value

    def end(self):
        for process in self.processes:
            process.kill()
            process.join()


def _main(function, pipe, results):
    try:
        results.send((True, function(pipe)))
    except BaseException:
        results.send((False, traceback.format_exc()))


def probe(body):
    """Run a probe's body, which returns what does not work, and end the program."""
    try:
        import cupy

        if not cupy.cuda.runtime.getDeviceCount():
            raise RuntimeError("no CUDA device")
    except Exception as error:
        print(f"NOT RUN: {type(error).__name__}: {str(error).splitlines()[0]}")
        sys.exit(NOT_RUN)
    try:
        wrong = body()
    except BaseException:
        traceback.print_exc()
        sys.exit(1)
    for line in wrong:
        print("WRONG:", line)
    sys.exit(bool(wrong))
