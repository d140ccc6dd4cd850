"""Checks of broken code, which may crash, hang or fail: each in a process of its own, forked from one that has imported
all that it takes.

python mutants.py MODULE     that one: of a module of this folder it runs `check`, with arguments that come as JSON
"""

import contextlib
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent
PASSED, NOTICED = 0, 3


class Mutants:
    """``module``: its `check(*arguments)` gives what it notices, or None."""

    def __init__(self, module):
        self._server = subprocess.Popen(
            [sys.executable, str(HERE / "mutants.py"), module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "UBSAN_OPTIONS": f"exitcode={NOTICED}"},
        )

    def noticed(self, seconds, *arguments):
        """How that check ended, if it did not pass: what it said, a crash, or that it took longer than so long."""
        self._server.stdin.write(json.dumps([seconds, arguments]) + "\n")
        self._server.stdin.flush()
        status, text = json.loads(self._server.stdout.readline())
        print(text)
        if status < 0:
            return f"longer than {seconds} s" if -status == signal.SIGALRM else signal.Signals(-status).name
        assert status in (PASSED, NOTICED), f"the check itself is broken:\n{text}"
        return (text.strip().splitlines() or ["noticed"])[-1] if status == NOTICED else None

    def close(self):
        self._server.stdin.close()
        self._server.wait(30)


@contextlib.contextmanager
def mutants(module):
    made = Mutants(module)
    try:
        yield made
    finally:
        made.close()


def serve(check, requests, answers):
    gc.collect()
    gc.freeze()  # what is here already need not be looked at in every child
    for line in requests:
        seconds, arguments = json.loads(line)
        with tempfile.TemporaryFile("w+", errors="replace") as output:
            child = os.fork()
            if child == 0:
                run(check, seconds, arguments, output)
            _, status = os.waitpid(child, 0)
            output.seek(0)
            print(json.dumps([os.waitstatus_to_exitcode(status), output.read()]), file=answers, flush=True)


def run(check, seconds, arguments, output):
    """In a process that ends with it, whatever threads are left, and at the alarm at the latest."""
    signal.alarm(seconds)
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    status = 1
    try:
        noticed = check(*arguments)
        if noticed is not None:
            print(str(noticed).replace("\n", " "))
        status = PASSED if noticed is None else NOTICED
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    sys.path[:0] = [str(HERE.parent), str(HERE)]
    # What a check prints is not an answer.
    to_client = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(importlib.import_module(sys.argv[1]).check, sys.stdin, to_client)
