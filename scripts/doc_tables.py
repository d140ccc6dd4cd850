"""The generated parts of docs/: the support matrix and the environment variables, from the package's own tables and the
measurement of gloo in tests/gloo_support.json; which versions of torch and Python the suite ran on, and which machines,
from tests/torch_api/versions.json; which MPIs, from tests/mpi/versions.json; what frameworks made of this backend, from
tests/ecosystem/frameworks/outcomes.json; what has run on a GPU, from the reports in tests/gpu/results; what each file
is for, from the first sentence in it; which cache lines move in a call, from scripts/bench/lines.py, and what a test of
the core expects of that.

    python scripts/doc_tables.py          rewrites the pages
    python scripts/doc_tables.py --check  exits 1 if a page is not what it would write
"""

import ast
import itertools
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "python"))  # this checkout's, whichever is installed

from c10d_custom import config, dtypes  # noqa: E402

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
    supports, ours = gloo["supports"], dict(dtypes.TABLE)  # of every torch, whichever is here
    rows = []
    for name in supports["broadcast"]:
        moves = [supports[m][name] for m in MOVES]
        moved = "yes" if all(moves) else f"**ours** (gloo: {sum(moves)} of {len(MOVES)})"
        rows.append(
            [f"`{name}`", moved] + [mark(op in ours[name], supports[f"all_reduce {op}"][name]) for op in REDUCES]
        )
    return (
        f"yes: both; **ours**: works here, not on gloo (torch {gloo['torch']}); ·: has no meaning for the dtype, "
        "and is a clear "
        "error here.\n*Moves* counts broadcast, all_gather (two forms), gather, scatter, all_to_all (two forms) "
        "and send/recv.\n\n" + table(["dtype", "moves"] + [f"`{op}`" for op in REDUCES], rows)
    )


def environment():
    def allowed(setting):
        if setting.among:
            return ", ".join(f"`{value}`" for value in setting.among)
        return "any path" if setting.default == "" else f"{setting.low} to {setting.high}"

    return table(
        ["variable", "default", "allowed", "meaning"],
        [
            [f"`{s.variable}`", "none" if s.default == "" else str(s.default), allowed(s), s.doc]
            for s in config.SETTINGS.values()
        ],
    )


def runs(columns, records):
    """A row for each of the runs that scripts/record_version.py has entered."""
    heads = {"python": "Python", "mpi": "MPI", "abi": "ABI", "files": "files of `tests/mpi`", "date": "on"}
    return table([heads.get(name, name) for name in columns], [[str(r[name]) for name in columns] for r in records])


COUNTS = "passed", "failed", "skipped", "date"
MACHINE = "x86_64"  # that the tests know best


def on_machines():
    return json.loads((ROOT / "tests" / "torch_api" / "versions.json").read_text())


def versions():
    return runs(("torch", "python", "suite", *COUNTS), [r for r in on_machines() if r["machine"] == MACHINE])


def architectures():
    """Of the machine that the tests know best, the newest run of the whole suite; of each other, all."""
    best, *_ = (r for r in on_machines() if (r["machine"], r["suite"]) == (MACHINE, "whole"))
    others = [r for r in on_machines() if r["machine"] != MACHINE]
    return runs(("machine", "torch", "python", "suite", *COUNTS), [best, *others])


def mpis():
    records = json.loads((ROOT / "tests" / "mpi" / "versions.json").read_text())
    return runs(("mpi", "abi", "mpi4py", "torch", "python", "machine", "files", *COUNTS), records)


def frameworks():
    """A row for a case of a framework, for all versions of torch that saw the same."""
    sys.path.insert(0, str(ROOT / "tests" / "ecosystem"))
    from frameworks.table import FRAMEWORKS

    records = json.loads((ROOT / "tests" / "ecosystem" / "frameworks" / "outcomes.json").read_text())
    rows = []
    for name, framework in FRAMEWORKS.items():
        for case, row in framework.cases.items():
            by_torch = {}
            for r in records:
                if (r["framework"], r["case"]) == (name, case):
                    by_torch.setdefault(r["torch"], {})[r["way"]] = r
            alike = {}  # {what was seen: versions of torch}
            for torch, ways in by_torch.items():
                said = tuple(ways[w]["outcome"] if w in ways else "no way to ask" for w in ("replaced", "custom"))
                one = ways["replaced"]
                alike.setdefault((one["versions"], *said, one["date"]), []).append(torch)
            for (versions, replaced, custom, date), torches in alike.items():
                rows.append([versions, row.what, replaced, custom, ", ".join(sorted(torches)), date])
    return table(["framework", "what", "gloo replaced", 'as "custom"', "torch", "on"], rows)


NOT_YET = "not yet run on a GPU"
# Of a report, parts that failed by the check's own fault, which has been mended since: so they have not run.
MENDED = {
    "20261127-163037-more-4fa0b23c55": {"conformance, 4 ranks"},
    "20261127-163513-speed-4fa0b23c55": {
        *(f"bench: {name}" for name in ("all reduce", "ddp", "modes", "operations", "one rank")),
        "goals",
    },
    "20261127-163730-probe-4fa0b23c55": {"fused kernels, ranks of one process"},
    "20261127-165548-more-8af978b223": {"1 MiB of staging"},
}


def on_gpus(folder=ROOT / "tests" / "gpu" / "results"):
    """A row for each part of scripts/gpu_check's presets: what the last report says that has tried it on a GPU."""
    sys.path.insert(0, str(ROOT / "tests"))
    from gpu.check.presets import BEGIN, PRESETS, WITHOUT_GPU

    said = {}  # {part: the last of what was seen}
    reports = [(json.loads(path.read_text()), MENDED.get(path.stem, ())) for path in folder.glob("*.json")]
    for report, mended in sorted(reports, key=lambda r: r[0]["date"]):
        of = report["commit"] if report["commit"] != "unknown" else f"sources {report['sources']}"
        where = f"{report['device']}, {report['date'].split()[0]}, {of}"
        for part in report["parts"] if report["kind"] == "cuda" and report["gpus"] else ():
            words = {"PASS": f"seen on {where}", "FAIL": f"failed on {where}: {part['reason']}".replace("|", "\\|")}
            if part["verdict"] in words and part["name"] not in mended:
                said[part["name"]] = words[part["verdict"]]
    of = {}  # {part: the presets that have it}
    for preset in (p for p in PRESETS if p not in WITHOUT_GPU):
        for part in PRESETS[preset]:
            if part not in BEGIN:
                of.setdefault(part.name, []).append(f"`{preset}`")
    rows = [[", ".join(presets), part, said.get(part, NOT_YET)] for part, presets in of.items()]
    return table(["preset", "part", "on a GPU"], rows)


def first_sentence(text):
    text = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=[.:])(?= [A-Z])", text)[0].rstrip(".:").replace("|", "\\|") if text else ""


def of_package():
    rows = []
    for file in (ROOT / "python" / "c10d_custom").rglob("*.py"):
        name = file.relative_to(ROOT / "python" / "c10d_custom")
        said = ast.get_docstring(ast.parse(file.read_text()))
        if file.name != "__init__.py" and said:
            rows.append([f"`{name}`", first_sentence(said)])
    return table(["file of `python/c10d_custom`", ""], sorted(rows, key=lambda r: ("/" in r[0], r[0])))


def of_core():
    rows = []
    for file in sorted((ROOT / "backend").rglob("*")):
        if file.suffix in (".h", ".cpp", ".c", ".inc"):
            lines = itertools.takewhile(lambda line: line.startswith("//"), file.read_text().splitlines())
            if said := first_sentence(" ".join(line.removeprefix("//").strip() for line in lines)):
                sources = [file.with_suffix(suffix) for suffix in (".cpp", ".c") if file.suffix == ".h"]
                names = [file, *(source for source in sources if source.exists() and source.read_text()[:2] != "//")]
                rows.append([", ".join(f"`{name.relative_to(ROOT / 'backend')}`" for name in names), said])
    return table(["file of `backend`", ""], rows)


def of_scripts():
    rows = []
    for file in [ROOT / ".ci" / "run", ROOT / "setup.py", *sorted((ROOT / "scripts").rglob("*"))]:
        text = file.read_text() if file.is_file() and file.suffix in ("", ".py", ".sh") else ""
        if text.startswith("#!") and "python" not in text.splitlines()[0]:
            lines = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines()[1:])
            said = " ".join(line.removeprefix("#").strip() for line in lines)
        else:
            said = (ast.get_docstring(ast.parse(text)) or "") if file.suffix == ".py" else ""
        if said := first_sentence(said):
            rows.append([f"`{file.relative_to(ROOT)}`", said])
    return table(["file", ""], rows)


def lines():
    sys.path.insert(0, str(ROOT / "scripts"))
    from bench import lines

    return lines


def lines_moved():
    return table(lines().HEAD, lines().rows())


PAGES = {
    "docs/internals/cost-model.md": {"lines": lines_moved},
    "docs/internals/files.md": {"package": of_package, "core": of_core, "scripts": of_scripts},
    "docs/support.md": {"support": support, "versions": versions, "architectures": architectures, "mpis": mpis},
    "docs/frameworks.md": {"frameworks": frameworks},
    "docs/results/gpu-checks.md": {"on-gpus": on_gpus},
    "docs/configuration.md": {"environment": environment},
}


WHOLE = {"backend/tests/access_count_expected.inc": lambda: lines().expected()}  # files that are nothing else


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
    for page in (*WHOLE, *PAGES):
        before = (ROOT / page).read_text()
        after = WHOLE[page]() if page in WHOLE else filled(page, before)
        if before != after:
            stale.append(page)
            if not check:
                (ROOT / page).write_text(after)
    return f"out of date: {', '.join(stale)}; run scripts/doc_tables.py" if check and stale else 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
