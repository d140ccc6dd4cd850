"""Rank 1 ends early, in the way asked for, while the others wait for it where asked."""

import os
import sys
import time

import torch
import torch.distributed as dist

how, where = sys.argv[1:]
before = sys.exit


def hook(*_):
    print("the program's own hook", file=sys.stderr)


if how == "own_hook_before":
    sys.excepthook = hook
dist.init_process_group(os.environ.get("C10D_TEST_BACKEND", "custom"))
assert sys.exit is before
if dist.get_rank() == 1:
    if how == "raise":
        raise ZeroDivisionError("the reason")
    if how == "interrupt":
        raise KeyboardInterrupt
    if how == "exit":
        sys.exit(3)
    if how == "exit_raised":
        raise SystemExit(3)
    if how == "own_hook":
        sys.excepthook = hook
        raise ZeroDivisionError
    if how == "own_hook_before":
        raise ZeroDivisionError
    if how == "exit_builtin":
        exit(3)
    if how == "exit_text":
        sys.exit("the reason")
    if how == "caught":
        try:
            sys.exit(3)
        except SystemExit as error:
            assert error.code == 3
elif where == "collective":
    dist.all_reduce(torch.ones(1))
elif where == "busy":
    time.sleep(200)
# where == "finalize": in MPI's Finalize, at exit
