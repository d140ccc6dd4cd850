"""docs/tutorial.md: its programs, as they stand there, print what stands there, and with gloo the same."""

import re
from pathlib import Path

import pytest
import torch

from harness import Layout

from .launch import start

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tutorial.md"
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
PROGRAMS = {re.match(r"# (\w+\.py)\n", text)[1]: text for kind, text in BLOCKS if kind == "python"}
RUNS = [  # (ranks, program, what it prints), as they follow on the page
    (int(ranks), program, shown)
    for kind, text in BLOCKS
    if not kind
    for ranks, program, shown in re.findall(r"\A\$ torchrun --nproc-per-node (\d) (\w+\.py)\n(.*)", text, re.S)
]
FAILING = ("leave.py", "differ.py")
WITH_FULL = {  # programs, and what of the default run does the same
    "hello.py": "message.py begins so",
    "exchange.py": "test_programs' p2p_nonblocking",
    "sgd.py": "test_programs' sgd_partitioned",
}
IN_IT = 'dist.init_process_group("custom")'

pytestmark = pytest.mark.skipif(Layout.chosen() is not None, reason="--job: the page starts its programs by torchrun")


def torchrun(folder, ranks, program):
    # Ranks that fail together are all to say so before torchrun, which has seen the first fail, ends the others.
    launcher = ["-m", "torch.distributed.run", "--standalone", "--monitor-interval=2", f"--nproc-per-node={ranks}"]
    return start([*launcher, program], cwd=folder, deadline=120)


def save(folder, backend):
    for name, text in PROGRAMS.items():
        assert text.count(IN_IT) == (name != "task.py"), name
        (folder / name).write_text(text.replace(IN_IT, f'dist.init_process_group("{backend}")'))


def test_every_block_is_tested():
    assert {program for _, program, _ in RUNS} == PROGRAMS.keys() - {"task.py"}
    assert len(RUNS) == sum(not kind for kind, _ in BLOCKS)


@pytest.mark.parametrize("backend", ["custom", pytest.param("gloo", marks=pytest.mark.full("none of it is ours"))])
@pytest.mark.parametrize(
    "program",
    [
        pytest.param(p, marks=pytest.mark.full(WITH_FULL[p]) if p in WITH_FULL else ())
        for p in PROGRAMS
        if p not in (*FAILING, "task.py")
    ],
)
def test_a_program_prints_what_the_page_says(program, backend, tmp_path):
    save(tmp_path, backend)
    for ranks, name, shown in RUNS:
        if name == program:
            result = torchrun(tmp_path, ranks, name)
            # Now and then gloo aborts when all is printed: a thread of its own drops a tensor that Python knows, while
            # the interpreter ends (as pytorch pull request 179291 describes).
            aborted = backend == "gloo" and "terminate called without an active exception" in result.errors
            assert (result.code == 0 or aborted) and not result.left_over, str(result)
            rest = result.output
            # torchrun's ranks write a line and its end in two pieces: two ranks' lines may stand on one.
            for line in sorted(shown.splitlines(), key=len, reverse=True):
                assert line in rest, f"{line!r}\n{result}"
                rest = rest.replace(line, "", 1)
            assert not rest.strip(), f"{rest!r}\n{result}"


def said(text):
    """{rank: what it says}, without the line breaks, and what differs from run to run."""
    words, rank = {}, None
    for line in text.splitlines():
        if found := re.match(r"\[rank(\d)\]: ?(.*)", line):
            rank, line = int(found[1]), found[2]
        words.setdefault(rank, []).extend(line.split())
    return {rank: re.sub(r"\d+\.\d+ s|pid \d+", "...", " ".join(w)) for rank, w in words.items() if rank is not None}


@pytest.mark.parametrize("program", FAILING)
def test_a_mistake_is_told_as_the_page_says(program, tmp_path):
    save(tmp_path, "custom")
    ((ranks, name, shown),) = [run for run in RUNS if run[1] == program]
    result = torchrun(tmp_path, ranks, name)
    assert result.code == 1 and not result.left_over, str(result)
    expected, found = said(shown), said(result.errors)
    assert expected and all(text in found[rank] for rank, text in expected.items()), f"{expected}\n{result}"


def test_the_losses_are_those_of_one_process():
    """One process, on the ranks' batches put together."""
    task = {}
    exec(compile(PROGRAMS["task.py"], "task.py", "exec"), task)
    parts = [task["DataPartitioner"](task["points"](), 2).use(i) for i in range(2)]
    model = task["model"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(6):
        total = 0.0
        loaders = [torch.utils.data.DataLoader(part, batch_size=32) for part in parts]
        for batches in zip(*loaders, strict=True):
            optimizer.zero_grad()
            x, y = (torch.cat(both) for both in zip(*batches, strict=True))
            loss = task["loss_of"](model(x), y)
            loss.backward()
            optimizer.step()
            total += loss.item()
        losses.append(total / len(loaders[0]))
    assert losses[-1] < losses[0] / 3
    for program in ("sgd.py", "ddp.py", "halves.py", "resume.py"):
        printed = [float(n) for _, name, shown in RUNS if name == program for n in re.findall(r"loss (\S+)", shown)]
        # Three digits are printed; a mean of two means is rounded otherwise than the mean of all.
        assert printed == pytest.approx(losses, abs=6e-4), program
