"""What this backend is called, and why it has two names."""

# By users, and by whatever reads the name of a group.
NAME = "custom"
# By `_get_backend_name`. A group of torch's own answers NAME there for every backend that torch does not know;
# libraries (torchrec 1.9) take such a group for a fake one, and leave its communication out.
IMPLEMENTATION = "c10d_custom"
# Other backends' names under which groups of this one are made, too: replacing.py.
replaced: set[str] = set()
