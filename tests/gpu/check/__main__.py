"""``scripts/gpu_check PRESET``: builds the package, runs the preset's parts one after another, and reports as it goes.

Standard library only: what needs more is in the parts. Whatever ends this process, its parts end, too (guard.py). Exit
status: 0 when nothing failed, 1 when something did, 2 when there was no CUDA device, or no package, to try.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import time
import uuid
from datetime import UTC, datetime
from pathlib import Path

from .presets import PRESETS, SECONDS, WITHOUT_GPU, listed
from .report import Report, summary_line
from .run import FAIL, LAST_WORDS, NOT_RUN, PASS, Outcome, Running

ROOT = Path(__file__).resolve().parents[3]
DEVICES = ("/dev/nvidiactl", "/dev/dxg")
PATIENCE = 8  # times what a part has, where it is tried on a machine like any other
FIRST = {"set-up", "environment"}  # whatever comes after them needs them


def arguments():
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_check",
        description="Checks this checkout on a machine with a GPU, in nine minutes at most for each preset.",
    )
    parser.add_argument("preset", nargs="?", choices=list(PRESETS))
    parser.add_argument("--list", action="store_true", help="print each preset's parts and limits")
    parser.add_argument("--out", metavar="DIR", default=ROOT / "tests/gpu/results", help="for the report")
    parser.add_argument("--package", metavar="DIR", type=Path, help="where c10d_custom is (default: it is built)")
    parser.add_argument("--commit", help="what the report says was checked (default: git's answer, or unknown)")
    parser.add_argument("--only", metavar="WORD[,WORD...]", help="only parts whose names have one of the words")
    parser.add_argument(
        "--device", choices=("cuda", "simulated"), default="cuda", help="simulated: try the check itself"
    )
    parser.add_argument("--short", action="store_true", help="a little of each part, likewise")
    args = parser.parse_args()
    if args.preset in WITHOUT_GPU:
        args.device = "cpu"
    if not args.list and args.preset is None:
        parser.error(f"name a preset: {', '.join(PRESETS)}")
    if args.package is not None:
        args.package = args.package.resolve()
        if not (args.package / "c10d_custom").is_dir():
            parser.error(f"there is no c10d_custom in {args.package}")
    return args


def there_is_a_gpu():
    if any(os.path.exists(path) for path in DEVICES):
        return True
    try:
        return subprocess.run(["nvidia-smi", "-L"], capture_output=True, timeout=20).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def commit(given):
    """Of the checkout, with + where it has changes."""
    if given:
        return given
    git = ["git", "-C", str(ROOT)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short=10", "HEAD"], text=True, capture_output=True)
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], text=True, capture_output=True)
    except OSError:
        return "unknown"
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "") if head.returncode == 0 else "unknown"


def digest():
    """Of what the package is built from and tested with: without git, what tells what was checked."""
    whole = hashlib.sha256()
    for path in sorted(p for folder in ("backend", "python", "tests", "scripts") for p in (ROOT / folder).rglob("*")):
        relative = path.relative_to(ROOT)
        if path.suffix in (".py", ".cpp", ".h", ".c", ".inc", "") and path.is_file() and "build" not in relative.parts:
            whole.update(str(relative).encode() + b"\0" + path.read_bytes())
    return whole.hexdigest()[:16]


def chosen(preset, only):
    words = (only or "").split(",")
    return [p for p in PRESETS[preset] if p.name in FIRST or any(w.strip().lower() in p.name.lower() for w in words)]


class Guard:
    """The process that outlives this one; ``folder``: for temporary files, which goes with it."""

    def __init__(self):
        self.mark = uuid.uuid4().hex
        self._process = subprocess.Popen(
            [sys.executable, "-m", "gpu.check.guard", self.mark],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )
        self.folder = Path(self._process.stdout.readline().strip())

    def end(self):
        self._process.stdin.close()
        self._process.wait(30)


def place_of_the_package(sources, folder):
    """Where it is built: kept for the next preset if that can be."""
    site = ROOT / "build" / f"gpu-check-{sources}-{sys.implementation.cache_tag}"
    try:
        site.parent.mkdir(exist_ok=True)
        if os.access(site.parent, os.W_OK):
            return site
    except OSError:
        pass
    return folder / "site"


def check(parts, context, guard, report, end):
    """Runs them. Why it ended before the last, or None."""
    for part in parts:
        folder = guard.folder / "part"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        limit = min(part.limit * context["patience"], end - time.monotonic())
        if context["device"] != "cuda" and not part.simulated:
            outcome = Outcome(part.name, NOT_RUN, "needs a real GPU")
        elif limit < LAST_WORDS:
            outcome = Outcome(part.name, NOT_RUN, "no time was left", cut=True)
        else:
            filled = {**context, "limit": f"{limit - LAST_WORDS:.0f}"}
            outcome = Running(part, filled, folder, guard.mark).run(limit, report.add)
        if part.name == "environment":
            report.head.update(report.data().get("about", {}))
        report.add(outcome)
        print(summary_line(outcome), flush=True)
        if part.name in FIRST and outcome.verdict != PASS:
            return f"{part.name}: {outcome.reason}, so nothing was checked"
    return None


def main():
    began = time.monotonic()
    args = arguments()
    if args.list:
        print(listed())
        return 0
    if args.device == "cuda" and not there_is_a_gpu():
        print(f"There is no CUDA device here, so the preset {args.preset} was not run.")
        return 2
    guard = Guard()
    try:
        return run(args, guard, began)
    finally:
        guard.end()


def run(args, guard, began):
    now, what, sources = datetime.now(UTC), commit(args.commit), digest()
    (data := guard.folder / "data").mkdir()
    os.environ.setdefault("C10D_TEST_KERNELS", str(guard.folder / "kernels"))  # of a simulated GPU
    settings = {k: v for k, v in sorted(os.environ.items()) if k.startswith(("C10D_CUSTOM_", "NCCL_", "CUDA_"))}
    head = {
        "preset": args.preset,
        "date": f"{now:%Y-%m-%d %H:%M:%S} UTC",
        "commit": what,
        "sources": sources if args.package is None else "unknown",
        "device": "not yet known",
        "gpus": 0,
        "kind": args.device,
        "options": " ".join(sys.argv[1:]),
        "settings": settings,
    }
    slug = "".join(c if c.isalnum() else "-" for c in what).strip("-")
    report = Report(args.out, f"{now:%Y%m%d-%H%M%S}-{args.preset}-{slug}", head, data)
    context = {
        "python": sys.executable,
        "device": args.device,
        "root": str(ROOT),
        "site": str(args.package or place_of_the_package(sources, guard.folder)),
        "data": str(data),
        "short": args.short,
        "patience": PATIENCE if args.short else 1,
    }
    end = began + SECONDS[args.preset] * context["patience"] - 2 * LAST_WORDS
    problem = check(chosen(args.preset, args.only), context, guard, report, end)
    report.write(over=True)
    print(f"{report.verdict()}\nreport: {report.text}")
    if problem:
        print(problem)
        return 2
    passed = any(o.verdict == PASS for o in report.outcomes if o.name not in FIRST)
    return int(not passed or any(o.verdict == FAIL or o.cut for o in report.outcomes))


if __name__ == "__main__":
    sys.exit(main())
