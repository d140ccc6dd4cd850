"""The end of the interpreter: who still finds the group, and what is told who does not."""

import subprocess
import sys

PROGRAM = """
import atexit, os, sys, weakref
def call(when):
    t = torch.ones(1)
    try:
        dist.all_reduce(t)
        os.write(1, f"{when}: {t.item()}\\n".encode())
    except Exception as error:
        os.write(1, f"{when}: {type(error).__name__}: {error}\\n".encode())
class Late:
    def __del__(self):
        assert sys.is_finalizing()  # nothing can be imported
        call("at the very end")
atexit.register(call, "registered before torch")
import torch, torch.distributed as dist
atexit.register(call, "registered before the group")
kept = Late()
weakref.finalize(kept, call, "finalized")
dist.init_process_group("custom", rank=0, world_size=1, store=dist.HashStore())
atexit.register(call, "registered after it")
sys.__interactivehook__ = Late()
"""


def test_exit_handlers_find_the_group_or_are_told_why_not():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, ""), done
    said = [line.split(": ", 1) for line in done.stdout.splitlines()]
    well = ["registered after it", "registered before the group", "finalized"]
    assert said[:3] == [[when, "1.0"] for when in well], said
    assert [when for when, _ in said[3:]] == ["registered before torch", "at the very end"], said
    for _, what in said[3:]:
        assert what.startswith("AbortedError: all_reduce of group 0, rank 0: the interpreter is ending"), said
