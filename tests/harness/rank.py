"""What each rank of a job runs (see job.py): python rank.py SOCKET"""

import os
import pickle
import socket
import sys
from multiprocessing import current_process
from multiprocessing.connection import Connection


def launcher_rank():
    """(rank, number of ranks) as the launcher's environment has them."""
    for rank, size in (
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("PMI_RANK", "PMI_SIZE"),
        ("RANK", "WORLD_SIZE"),  # torchrun
    ):
        if rank in os.environ:
            return int(os.environ[rank]), int(os.environ[size])
    raise RuntimeError("no launcher has started this process")


def extend_path(search_path):
    """What of a path is missing goes in front; the rest stays as it is, as this may be another environment."""
    sys.path[:0] = [folder for folder in search_path if folder not in sys.path]


def main():
    rank, size = launcher_rank()
    with socket.socket(socket.AF_UNIX) as reached:
        reached.connect(sys.argv[1])
        connection = Connection(reached.detach())
    # With the parent's key, tensors can be sent to it: it fetches their memory from us.
    current_process().authkey, search_path, call = connection.recv()
    connection.send(rank)
    sys.path.pop(0)  # this file's folder
    extend_path(search_path)
    target, args = pickle.loads(call)
    target(rank, size, connection, *args)


if __name__ == "__main__":
    main()
