"""The generated parts of docs/: the support matrix and the environment variables, from the package's own tables and the
measurement of gloo in tests/gloo_support.json; and which versions of torch the suite ran on, from
tests/torch_api/versions.json.

    python scripts/doc_tables.py          rewrites the pages
    python scripts/doc_tables.py --check  exits 1 if a page is not what it would write
"""

import json
import re
import sys
from dataclasses import fields
from pathlib import Path

from c10d_custom import config, dtypes

ROOT = Path(__file__).resolve().parent.parent
MOVES = [
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "gather",
    "scatter",
    "all_to_all",
    "all_to_all_single",
    "send_recv",
]
REDUCES = ["SUM", "PRODUCT", "MIN", "MAX", "AVG", "BAND", "BOR", "BXOR", "PREMUL_SUM"]


def table(head, rows):
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def mark(ours, gloo):
    return {(True, True): "yes", (True, False): "**ours**", (False, True): "gloo", (False, False): "·"}[ours, gloo]


def support():
    gloo = json.loads((ROOT / "tests" / "gloo_support.json").read_text())
    supports = gloo["supports"]
    rows = []
    for name in supports["broadcast"]:
        ours = next(d for d in dtypes.BY_DTYPE.values() if d.name == name)
        moves = [supports[m][name] for m in MOVES]
        moved = "yes" if all(moves) else f"**ours** (gloo: {sum(moves)} of {len(MOVES)})"
        rows.append(
            [f"`{name}`", moved] + [mark(op in ours.reduces, supports[f"all_reduce {op}"][name]) for op in REDUCES]
        )
    return (
        f"yes: both; **ours**: works here, not on gloo (torch {gloo['torch']}); ·: has no meaning for the dtype, "
        "and is a clear "
        "error here.\n*Moves* counts broadcast, all_gather (two forms), gather, scatter, all_to_all (two forms) "
        "and send/recv.\n\n" + table(["dtype", "moves"] + [f"`{op}`" for op in REDUCES], rows)
    )


def environment():
    def allowed(field):
        if among := field.metadata.get("among"):
            return ", ".join(f"`{value}`" for value in among)
        low, high = field.metadata["low"], field.metadata["high"]
        return "any path" if low is None else f"{low} to {high}"

    return table(
        ["variable", "default", "allowed", "meaning"],
        [
            [f"`{f.metadata['env']}`", "none" if f.default == "" else str(f.default), allowed(f), f.metadata["doc"]]
            for f in fields(config.Config)
        ],
    )


def versions():
    records = json.loads((ROOT / "tests" / "torch_api" / "versions.json").read_text())
    if not records:
        return "No run has been recorded yet (`C10D_TEST_RECORD=1`)."
    return table(
        ["torch", "Python", "suite", "passed", "failed", "skipped", "on"],
        [
            [r["torch"], r["python"], r["suite"], *(str(r[n]) for n in ("passed", "failed", "skipped")), r["date"]]
            for r in records
        ],
    )


PAGES = {
    "docs/support.md": {"support": support, "versions": versions},
    "docs/configuration.md": {"environment": environment},
}


def filled(page, text):
    for name, part in PAGES[page].items():
        pattern = rf"(<!-- begin {name} -->\n).*?<!-- end {name} -->"
        made = part()
        text, count = re.subn(pattern, lambda m: f"{m[1]}{made}\n<!-- end {name} -->", text, flags=re.S)
        if count != 1:
            sys.exit(f"{page} needs exactly one part between <!-- begin {name} --> and <!-- end {name} -->")
    return text


def main(check):
    stale = []
    for page in PAGES:
        before = (ROOT / page).read_text()
        after = filled(page, before)
        if before != after:
            stale.append(page)
            if not check:
                (ROOT / page).write_text(after)
    return f"out of date: {', '.join(stale)}; run scripts/doc_tables.py" if check and stale else 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
