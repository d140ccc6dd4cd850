"""What python/c10d_custom/c10d/torch_private.py says that we rest on of torch. As a program, says which of it this
torch lacks, without importing what would fail there."""

import ast
import ctypes
from pathlib import Path

import torch
import torch.distributed  # noqa: F401  what it adds to torch

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "python" / "c10d_custom" / "c10d" / "torch_private.py"
WORD = "_ZN3c104impl26raw_local_dispatch_key_setE"


def rows():
    """(names, files, since which torch, what is lost without) of each line of the table."""
    for line in ast.get_docstring(ast.parse(TABLE.read_text())).splitlines():
        if line.count(" | ") == 3 and not line.startswith("name in torch"):
            name, files, since, lost = line.split(" | ")
            yield name, [TABLE.name if f == "here" else f for f in files.split(", ")], since, lost


def version(text):
    return tuple(int(n) for n in text.split("+")[0].split(".")[:2])


def each(name):
    """Of "torch.distributed.isend, irecv: their code" both, in full."""
    if name.startswith("libc10"):
        return [WORD]
    first, *others = name.split(":")[0].split(", made")[0].split(", ")
    return [first, *(f"{first.rpartition('.')[0]}.{other}" for other in others)]


def there(name):
    if name == WORD:
        return hasattr(ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libc10.so")), name)
    here = torch
    for part in name.split(".")[1:]:
        here = getattr(here, part, None)
    return here is not None


def moved():
    """(name, files, what is lost) of those that this torch lacks, and should have."""
    for names, files, since, lost in rows():
        if since.startswith("before") or (since != "all" and version(torch.__version__) < version(since)):
            continue
        yield from ((name, files, lost) for name in each(names) if not there(name))


if __name__ == "__main__":
    gone = list(moved())
    print(f"torch {torch.__version__}: {len(gone)} of the private names that we rest on have moved")
    for name, files, lost in gone:
        print(f"  {name} ({', '.join(files)}); lost without it: {lost}")
