"""How a job comes to be: the launcher's environment, the rendezvous of ranks without an address, MPI's start. Imported
by all above."""
