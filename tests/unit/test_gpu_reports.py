"""docs/cuda.md's table of what has run on a GPU: from reports, the last of each part that tried it there."""

import importlib.util
import json
from pathlib import Path

from gpu.check.presets import PRESETS, WITHOUT_GPU

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "doc_tables.py"


def doc_tables():
    spec = importlib.util.spec_from_file_location("doc_tables", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(folder):
    lines = doc_tables().on_gpus(folder).splitlines()[2:]
    return {tuple(line.strip("| ").split(" | ")[:2]): line.strip("| ").split(" | ", 2)[2] for line in lines}


def report(folder, date, *parts, **words):
    said = {"date": f"{date} 10:00:00 UTC", "preset": "right", "commit": "abc", "sources": "0123", "device": "H100"}
    said |= {"gpus": 1, "kind": "cuda", "parts": [dict(zip(("name", "verdict", "reason"), p)) for p in parts]}
    (folder / f"{len(list(folder.iterdir()))}.json").write_text(json.dumps(said | words))


def test_without_reports_nothing_has_run(tmp_path):
    found = rows(tmp_path)
    assert set(found.values()) == {"not yet run on a GPU"}
    named = {part.name for preset, parts in PRESETS.items() if preset not in WITHOUT_GPU for part in parts[2:]}
    assert {part for _, part in found} == named  # less set-up and environment


def test_the_last_that_tried_a_part_counts(tmp_path):
    report(tmp_path, "2026-03-02", ("streams", "PASS", ""), ("staged", "FAIL", "1 failed: a | b"))
    report(tmp_path, "2026-03-01", ("streams", "FAIL", "1 failed"), commit="unknown")
    report(
        tmp_path, "2026-03-03", ("streams", "NOT RUN", ""), ("staged", "RUNNING", ""), ("kernels compiled", "PASS", "")
    )
    report(tmp_path, "2026-03-04", ("DDP, FSDP2, hooks", "PASS", ""), commit="unknown")
    report(tmp_path, "2026-03-05", ("streams", "FAIL", ""), kind="cpu")
    report(tmp_path, "2026-03-05", ("streams", "FAIL", ""), gpus=0)
    name, mended = next(iter(doc_tables().MENDED.items()))
    report(tmp_path, "2026-03-06", *((part, "FAIL", "by the check's own fault") for part in mended))
    (tmp_path / "6.json").rename(tmp_path / f"{name}.json")
    found = rows(tmp_path)
    assert found["`rest`", "streams"] == "seen on H100, 2026-03-02, abc"
    assert found["`rest`", "staged"] == "failed on H100, 2026-03-02, abc: 1 failed: a \\| b"
    assert found["`rest`", "DDP, FSDP2, hooks"] == "seen on H100, 2026-03-04, sources 0123"
    assert found["`once`, `more`, `rest`, `wide`", "kernels compiled"] == "seen on H100, 2026-03-03, abc"
    assert [said for (_, part), said in found.items() if part in mended] == ["not yet run on a GPU"]
