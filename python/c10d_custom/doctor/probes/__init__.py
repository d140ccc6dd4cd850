"""What no document says of a GPU, asked of the one at hand: run.py runs each probe in processes of its own, which are
killed when its time is over. The questions, and what the answers decide, are data: transport/cuda/decisions.py.

The probes speak to the GPU as a group does, through transport/cuda/driver.py, so that what they find is what a group
gets; the few things that a group has no use for are in gpu.py."""
