"""What torch.distributed promises of a backend, one file per collective. See README.md beside it."""
