"""What torch sees: the process group and the Backend, Work, registration, what torch.distributed offers beyond
operations (shrinking, profiling), and how a group is made of the packages below. Everything below may be imported from
here; nothing of this package is imported by those."""
