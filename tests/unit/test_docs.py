"""README.md and docs/: links and anchors lead somewhere, files that are named exist, tables are what they are made
of."""

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from c10d_custom import config, errors

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OURS = ("backend", "docs", "python", "scripts", "tests")  # folders of the checkout
SUFFIXES = (".py", ".c", ".cpp", ".h", ".inc", ".md", ".json", ".txt", ".png", ".svg")
# Where pages name Python files from.
BASES = (ROOT, ROOT / "python" / "c10d_custom")
README_LINES = 150
GLOSSARY_WORDS = 30

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@cache
def parts(page):
    """(prose without code, what stands in backticks, what stands in fences)"""
    fences, lines, inside = [], [], False
    for line in page.read_text().splitlines():
        if line.lstrip().startswith("```"):
            inside = not inside
        else:
            (fences if inside else lines).append(line)
    prose = "\n".join(lines)
    return re.sub(r"`[^`]*`", "", prose), re.findall(r"`([^`]+)`", prose), fences


@cache
def anchors(page):
    """Those that its headings have, as GitHub makes them."""
    seen, found, inside = {}, set(), False
    for line in page.read_text().splitlines():
        inside ^= line.lstrip().startswith("```")
        if inside or not (heading := re.fullmatch(r"#{1,6} (.*)", line)):
            continue
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1]).strip().lower()
        slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        found.add(slug if slug not in seen else f"{slug}-{seen[slug]}")
        seen[slug] = seen.get(slug, 0) + 1
    return found


def links(page):
    """(file, anchor) of each link that is not into the world."""
    for target in re.findall(r"\]\(([^)\s]+)\)", parts(page)[0]):
        if not re.match(r"[a-z]+:", target):
            path, _, anchor = target.partition("#")
            yield target, (page.parent / path).resolve() if path else page, anchor


@cache
def files():
    """The names of all files of the checkout, without folders."""
    found = {path.name for path in ROOT.iterdir()}
    for folder in OURS:
        for _, folders, names in os.walk(ROOT / folder):
            folders[:] = [f for f in folders if f not in ("__pycache__", "build")]
            found.update(names)
    return found


def missing(page):
    """What it names as files of this checkout, and they are not there."""
    _, backticks, fences = parts(page)
    for word in " ".join([*backticks, *fences]).split():
        word = word.strip("\"'(),:;[]").removesuffix(".")
        if word.split("/")[0] in OURS and "/" in word and not re.search(r"[*{}<>$…]|\.\.\.", word):
            if not (ROOT / word).exists():
                yield word
    for text in backticks:
        if re.fullmatch(r"[\w./-]+", text) and text.endswith(SUFFIXES) and text[0] not in "/~":
            if "/" not in text:
                if text not in files():
                    yield text
            elif text.split("/")[0] not in OURS and not any((base / text).exists() for base in (*BASES, page.parent)):
                yield text


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES


@every_page
def test_links_lead_somewhere(page):
    dead = [
        target
        for target, path, anchor in links(page)
        if not path.exists() or anchor and (path.suffix != ".md" or anchor not in anchors(path))
    ]
    assert not dead


@every_page
def test_files_that_are_named_exist(page):
    assert not sorted(set(missing(page)))


def test_every_page_is_linked_to():
    linked = {path for page in PAGES for _, path, _ in links(page) if path != page}
    assert not sorted(str(page.relative_to(ROOT)) for page in set(PAGES) - linked - {ROOT / "README.md"})


def test_variables_that_are_named_exist():
    known = {name for name, *_ in config.table()}
    named = {name for page in PAGES for name in re.findall(r"\bC10D_CUSTOM_[A-Z_]*[A-Z]\b", page.read_text())}
    assert not {name for name in named if not any(variable.startswith(name) for variable in known)}


def test_every_error_has_a_section():
    page = ROOT / "docs" / "errors.md"
    kinds = {
        name.lower()
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.CustomBackendError)
    }
    assert not {kind for kind in kinds if not any(anchor.startswith(kind) for anchor in anchors(page))}


def test_the_glossary_is_short():
    rows = [
        line for line in (ROOT / "docs" / "internals" / "glossary.md").read_text().splitlines() if line.startswith("| ")
    ]
    assert len(rows) - 2 <= GLOSSARY_WORDS


def test_all_pages_say_alike_whether_a_gpu_has_run_it():
    generated = (ROOT / "docs" / "results" / "gpu-checks.md").read_text().split("<!-- begin on-gpus -->")[1]
    said = "run on one GPU in part" if "| seen on " in generated else "not yet run on (a GPU|one)"
    pages = [(ROOT / name).read_text() for name in ("docs/cuda.md", "README.md", "docs/README.md", "docs/support.md")]
    assert all(re.search(said, text, re.I) for text in pages)


def test_generated_tables_are_what_they_are_made_of():
    out = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "doc_tables.py"), "--check"], capture_output=True, text=True, timeout=60
    )
    assert out.returncode == 0, out.stderr
