"""How the ranks of a pool find each other."""

import os
from datetime import timedelta

# As torch's own rendezvous reads it: Debian's torch is built without libuv.
USE_LIBUV = os.environ.get("USE_LIBUV", "1") == "1"


class Rendezvous:
    """Made by the parent, joined by every rank; lives (see join) are told apart by their names.

    Spawned ranks get the parent's TCPStore: no port is chosen before it is bound. The ranks of a job get
    nothing, the backend has to find out from the launcher; but for backends which cannot, there is a FileStore.
    """

    def __init__(self, layout, backend, folder):
        self.server = self.port = self.path = None
        if layout is None:
            import torch.distributed as dist

            self.server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False, use_libuv=USE_LIBUV)
            self.port = self.server.port
        elif backend != "custom":
            self.path = str(folder / "store")

    def __getstate__(self):
        return {"server": None, "port": self.port, "path": self.path}

    def join(self, backend, rank, world_size, seconds, life="only"):
        """init_process_group, for the life of this name."""
        import torch.distributed as dist

        timeout = timedelta(seconds=seconds)
        if self.port is not None:
            server = dist.TCPStore("127.0.0.1", self.port, None, False, timeout, use_libuv=USE_LIBUV)
            store = dist.PrefixStore(life, server)
        elif self.path is not None:
            store = dist.FileStore(f"{self.path}-{life}", world_size)
        else:
            dist.init_process_group(backend, timeout=timeout)
            assert (dist.get_rank(), dist.get_world_size()) == (rank, world_size), (
                f"the launcher's rank {rank} of {world_size} is {dist.get_rank()} of {dist.get_world_size()} here"
            )
            return
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
