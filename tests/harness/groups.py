"""Groups whose calls have little time, and whose making has enough: on a busy machine it takes seconds."""

from datetime import timedelta

import torch.distributed as dist

MAKING = timedelta(seconds=60)


def group_with_timeout(timeout):
    """A group of all ranks; ``timeout``: a timedelta, of its calls."""
    group = dist.new_group(timeout=MAKING)
    dist.distributed_c10d._set_pg_timeout(timeout, group)
    return group
