"""Each framework of the table trains to gloo's bits when this backend takes gloo's place, and does as the table says
when it is asked for "custom". scripts/frameworks makes the environments, beside the one that this runs in, and runs
it."""

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from .table import FRAMEWORKS, script, wanted

CHOSEN = os.environ.get("C10D_TEST_FRAMEWORKS", "").split()
LIMIT = 150  # seconds for the trainings of one framework, asked for in one way
# What C++ says of gloo's own threads, where a process of it, without us, ends too soon for them: seen now and then.
ABORTED_AT_EXIT = "terminate called without an active exception"


def python(name):
    return Path(f"{sys.prefix}-{name}", "bin", "python")


@functools.cache
def launched(name, asks, **variables):
    """{BACKEND:CASE: [what each rank tells, see cases.py]}"""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("C10D_", "PYTHONPATH"))}
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **variables}
    with tempfile.TemporaryDirectory() as folder:
        done = _run(name, asks, environment, folder)
        if not variables and all(ask.startswith("gloo:") for ask in asks) and ABORTED_AT_EXIT in done.stdout:
            done = _run(name, asks, environment, folder)
        assert done.returncode == 0, done.stdout[-8000:]
        ranks = [json.loads(Path(folder, f"rank-{rank}.json").read_text()) for rank in range(2)]
    return {ask: [rank[ask] for rank in ranks] for ask in asks}


def _run(name, asks, environment, folder):
    return subprocess.run(
        [python(name), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        + [script(name), folder, *asks],
        env=environment,
        cwd=folder,  # some leave files where they are started
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT,
    )


def trained(name, case, way):
    """What each rank tells; ways: "gloo"; "replaced": the same, with this backend in gloo's place; "custom"."""
    framework = FRAMEWORKS[name]
    as_gloo = tuple(f"gloo:{case}" for case in framework.cases)
    as_custom = tuple(f"custom:{case}" for case, row in framework.cases.items() if row.custom)
    if way == "replaced":
        return launched(name, as_gloo, C10D_CUSTOM_REPLACES="gloo")[f"gloo:{case}"]
    if framework.one_group:
        return launched(name, as_custom if way == "custom" else as_gloo)[f"{way}:{case}"]
    return launched(name, as_gloo + as_custom)[f"{way}:{case}"]


@functools.cache
def versions(name):
    """As "lightning 2.6.6"; of several packages where the framework is several."""
    asked = "import importlib.metadata as m, sys; print(*(m.version(name) for name in sys.argv[1:]))"
    packages = FRAMEWORKS[name].packages
    done = subprocess.run([python(name), "-c", asked, *packages], capture_output=True, text=True, check=True)
    return ", ".join(f"{p} {v.split('+')[0]}" for p, v in zip(packages, done.stdout.split(), strict=True))


def pytest_generate_tests(metafunc):
    rows = [
        (name, case, way)
        for name in FRAMEWORKS
        if name in CHOSEN
        for way in ("replaced", "custom")
        for case in FRAMEWORKS[name].cases
        if wanted(name, case, way)
    ]
    reason = "scripts/frameworks makes the frameworks' environments, and runs these"
    metafunc.parametrize("name, case, way", rows or [pytest.param(None, None, None, marks=pytest.mark.skip(reason))])


def seen(told):
    return told.get("raised", told.get("digest")), told["groups"], told.get("where", "")


def test_trains_as_with_gloo(name, case, way, record_property):
    reference, ours, outcome = trained(name, case, "gloo"), trained(name, case, way), wanted(name, case, way)
    for told, of_gloo in zip(ours, reference, strict=True):
        assert "digest" in of_gloo and of_gloo["groups"] == ["gloo"], seen(of_gloo)
        assert tuple(told["groups"]) == outcome.groups, seen(told)
        if outcome.raises:
            assert re.match(outcome.raises, told.get("raised", "")) and outcome.where in told["where"], seen(told)
        else:
            assert "digest" in told, seen(told)
            assert told["digest"] == of_gloo["digest"]
    for key, value in dict(framework=name, versions=versions(name), case=case, way=way, outcome=outcome.text).items():
        record_property(key, value)
