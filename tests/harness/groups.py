"""Groups whose calls have little time, and whose making has enough: on a busy machine it takes seconds."""

from datetime import timedelta

import torch.distributed as dist

MAKING = timedelta(seconds=60)


def group_with_timeout(timeout):
    """A group of ours, of all ranks; ``timeout``: a timedelta, of its calls."""
    group = dist.new_group(timeout=MAKING)
    group.set_timeout(timeout)  # torch 2.11's _set_pg_timeout takes gloo's and NCCL's alone
    return group
