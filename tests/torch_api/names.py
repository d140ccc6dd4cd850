"""What python/c10d_custom/c10d/torch_private.py says that we rest on of torch. As a program, says which of it this
torch lacks, without importing what would fail there."""

import ast
import ctypes
import sys
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
    module, rest = name, []
    while module not in sys.modules:  # torch.distributed has a function by the name of its module rendezvous
        module, _, last = module.rpartition(".")
        rest.insert(0, last)
    here = sys.modules[module]
    for part in rest:
        here = getattr(here, part, None)
    return here is not None


def _is_private(name):
    parts = name.split(".")
    return parts[0] == "torch" and any(p.startswith("_") and not p.startswith("__") for p in parts)


def private(tree):
    """The private names of torch that a module's syntax tree reaches by its imports, in full."""
    known = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            known |= {a.asname or "torch": a.name if a.asname else "torch" for a in node.names if a.name[:5] == "torch"}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            known |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}

    def full(node):
        if isinstance(node, ast.Name):
            return known.get(node.id, "")
        if isinstance(node, ast.Attribute):
            of, last = node.value, node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            of, last = node.args[0], getattr(node.args[1], "value", "")
        else:
            return ""
        of = full(of)
        return f"{of}.{last}" if of else ""

    found = {name for node in ast.walk(tree) if (name := full(node))} | set(known.values())
    return {name for name in found if _is_private(name)}


def attributes(tree):
    """(the private attributes that a module's syntax tree asks anything for, the private names that it defines)"""
    asked, defined = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            (asked if isinstance(node.ctx, ast.Load) else defined).add(node.attr)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            defined.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defined.add(node.id)
    return {name for name in asked if name.startswith("_") and not name.startswith("__")}, defined


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
