"""Moves and reduces what a call says, between the ranks of a group. base.py is the contract; shm/, hosts/ and cuda/
carry it out, and do not import each other: by_device.py puts CPU and GPU together. Imported by c10d/ and, for codes, by
lowering/."""
