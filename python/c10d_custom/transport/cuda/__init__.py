"""CUDA tensors inside a host, and between hosts through pinned memory."""
