"""CPU tensors inside a host: shared memory and the native core."""
