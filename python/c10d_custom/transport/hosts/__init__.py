"""CPU tensors between hosts: MPI, and inside each host the transport that this one is handed."""
