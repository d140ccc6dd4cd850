"""What scripts/gpu_check runs once the package is built: the sections, one after the other, and the report.

Standard library only up to the sections' own commands. Ends with 0 when nothing failed and nothing was left out for
lack of time, 1 when something was, 2 when there was no CUDA device, or no package, to try.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from .report import Report, summary_line
from .run import FAIL, LAST_WORDS, NOT_RUN, PASS, Outcome, run
from .sections import SECTIONS

ROOT = Path(__file__).resolve().parents[3]
NO_DEVICE = "no CUDA device"
LOOK = (
    "import torch, sys; n = torch.cuda.device_count() if torch.cuda.is_available() else 0; "
    "print(n, torch.cuda.get_device_name(0) if n else 'none', sep='|')"
)
# Says what of these settings the package does not know, a line for each.
UNKNOWN = """
import json, os, sys
from c10d_custom import config
known = {name for name, *_ in config.TABLE}
for settings in json.loads(sys.argv[1]):
    unknown = ", ".join(name for name in settings if name not in known)
    os.environ.update(settings)
    try:
        config.Config.from_env()
    except ValueError as error:
        unknown = unknown or str(error)
    for name in settings:
        del os.environ[name]
    print(unknown)
"""


def arguments():
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_check", description="Checks this checkout on a machine with a GPU."
    )
    parser.add_argument("--out", metavar="FILE", help="the report (default: tests/gpu/results/DATE-DEVICE-COMMIT.txt)")
    parser.add_argument("--seconds", type=float, default=500, help="for all sections (default: %(default)s)")
    parser.add_argument(
        "--sections", metavar="WORD[,WORD...]", help="only those whose names have one of the words; list: show them"
    )
    parser.add_argument("--without", metavar="WORD[,WORD...]", help="not those whose names have one of the words")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: try the check itself where there is no GPU"
    )
    parser.add_argument("--commit", help="what the report says was checked (default: git's answer)")
    parser.add_argument(
        "--failed-set-up", metavar="FILE", help=argparse.SUPPRESS
    )  # the log of scripts/gpu_check's attempt
    parser.add_argument("--no-device", action="store_true", help=argparse.SUPPRESS)  # scripts/gpu_check saw none
    return parser.parse_args()


def commit(given):
    """Of the checkout, with + where it has changes; a copy without git says so."""
    if given:
        return given
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run([*git, "rev-parse", "--short=10", "HEAD"], text=True, capture_output=True)
    if head.returncode:
        return "nogit"
    changed = subprocess.run(
        [*git, "status", "--porcelain", "--untracked-files=no"], text=True, capture_output=True
    ).stdout
    return head.stdout.strip() + ("+" if changed.strip() else "")


def digest():
    """Of what the package is built from and tested with: a copy without git tells by it what it is a copy of."""
    whole = hashlib.sha256()
    for path in sorted(p for folder in ("backend", "python", "tests", "scripts") for p in (ROOT / folder).rglob("*")):
        relative = path.relative_to(ROOT)
        if path.suffix in (".py", ".cpp", ".h", ".inc", "") and path.is_file() and "build" not in relative.parts:
            whole.update(str(relative).encode() + b"\0" + path.read_bytes())
    return whole.hexdigest()[:16]


def device_name(kind):
    """(GPUs, the first one's name); (0, ...) without."""
    if kind == "cpu":
        return 1, "cpu"
    try:
        out = subprocess.run([sys.executable, "-c", LOOK], text=True, capture_output=True, timeout=60)
        count, name = out.stdout.strip().splitlines()[-1].split("|", 1)
        return int(count), name
    except (IndexError, ValueError, subprocess.TimeoutExpired):
        return 0, "none"


def chosen(args):
    def named(section, words):
        return any(word.strip().lower() in section.name.lower() for word in words.split(","))

    return [
        s
        for s in SECTIONS
        if (not args.sections or named(s, args.sections)) and not (args.without and named(s, args.without))
    ]


def unknown_settings(sections):
    """{name of a section: what of its settings this package does not know, if anything}"""
    asking = [s for s in sections if s.settings]
    if not asking:
        return {}
    out = subprocess.run(
        [sys.executable, "-c", UNKNOWN, json.dumps([s.settings for s in asking])], text=True, capture_output=True
    )
    if out.returncode:
        return {s.name: out.stderr.strip().splitlines()[-1] for s in asking}
    return {s.name: line for s, line in zip(asking, out.stdout.split("\n"))}


def why_not(section, gpus, kind, unknown):
    """Why a section makes no sense here, or None."""
    if not gpus and section.name != "environment":
        return NO_DEVICE
    if kind == "cpu" and not section.cpu:
        return "needs a GPU (--device cpu)"
    if unknown.get(section.name):
        return f"this package does not know {unknown[section.name]}"
    return None


def check(sections, gpus, kind, context, seconds, report):
    """Runs them. Each may use what those before it left, less what those after it are sure to get."""
    end = time.monotonic() + seconds
    unknown = unknown_settings(sections) if gpus else {}
    for i, section in enumerate(sections):
        left = end - time.monotonic()
        spare = left - sum(s.least for s in sections[i + 1 :]) - LAST_WORDS
        limit = min(section.limit, max(spare, section.least), left)
        if reason := why_not(section, gpus, kind, unknown):
            outcome = Outcome(section.name, NOT_RUN, reason)
        elif limit < min(section.least, 1):
            outcome = Outcome(section.name, NOT_RUN, "no time was left", cut=True)
        else:
            outcome = run(section, context, limit)
        report.add(outcome)
        print(summary_line(outcome), flush=True)


def main():
    args = arguments()
    sections = chosen(args)
    if args.sections == "list":
        print("\n".join(f"{s.name:<42} at most {s.limit:.0f} s" for s in SECTIONS))
        return 0
    gpus, name = (0, "none") if args.failed_set_up or args.no_device else device_name(args.device)
    now, what = datetime.now(UTC), commit(args.commit)
    slug = "".join(c if c.isalnum() else "-" for c in name.lower()).strip("-")
    out = Path(args.out or ROOT / "tests/gpu/results" / f"{now:%Y%m%d-%H%M%S}-{slug}-{what}.txt")
    settings = {k: v for k, v in sorted(os.environ.items()) if k.startswith(("C10D_CUSTOM_", "NCCL_", "CUDA_"))}
    head = [
        f"date     {now:%Y-%m-%d %H:%M:%S} UTC",
        f"commit   {what}, sources {digest()}",
        f"device   {name} ({gpus if args.device == 'cuda' else 0} GPUs)",
        f"options  {' '.join(sys.argv[1:]) or 'none'}",
        f"settings {settings or 'none'}",
    ]
    report = Report(out, head)
    if args.failed_set_up:
        report.add(
            Outcome(
                "set-up",
                FAIL,
                "the package could not be built here",
                output=Path(args.failed_set_up).read_text(errors="replace"),
            )
        )
        sections = []
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as work:
        context = {"python": sys.executable, "device": args.device, "work": work, "root": str(ROOT)}
        check(sections, gpus, args.device, context, args.seconds, report)
    report.write(done=True)
    print(f"{report.verdict()}\nreport: {out}")
    if args.failed_set_up:
        return 2
    if not gpus:
        print(f"{NO_DEVICE}, so nothing was checked")
        return 2
    return int(
        any(o.verdict == FAIL or o.cut for o in report.outcomes) or not any(o.verdict == PASS for o in report.outcomes)
    )


if __name__ == "__main__":
    sys.exit(main())
