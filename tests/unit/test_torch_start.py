"""What the tests' environments put off of torch's import (harness/torch_start.py) is there when it is needed."""

import subprocess
import sys

import pytest

STEP = """
import os, sys
import torch
import torch.distributed as dist

os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
dist.init_process_group("custom", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
optimizer = torch.optim.Adam(model.parameters())

def step():
    loss = model(torch.ones(2, 3) + torch.rand(3, generator=torch.Generator().manual_seed(1))).sum()
    loss.backward()
    optimizer.step()
    return loss

step()
whole = "torch._dynamo.config" in sys.modules, "torch._refs" in sys.modules
"""

COMPILED = """
assert torch.compile(torch.nn.Linear(3, 2), backend="aot_eager")(torch.ones(1, 3)).shape == (1, 2)
print(torch.compile(step, backend="eager")().item() < before, torch._dynamo.disable.__module__)
"""


def output(program, **environment):
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_a_step_of_ddp_needs_no_compiler_and_what_is_compiled_later_has_it():
    program = STEP + "assert whole == (False, False), whole\nbefore = step().item()" + COMPILED
    assert output(program) == "True torch._dynamo.decorators"


def test_without_it_all_is_imported():
    assert output(STEP + "print(*whole)", C10D_TEST_WHOLE_TORCH="1") == "True True"


@pytest.mark.parametrize("name", ["torch._refs.fft", "torch._dynamo.config"])
def test_what_is_put_off_may_be_imported_first_by_its_parts(name):
    program = f"""
import sys
import {name}
module = sys.modules["{name}"]
assert vars(module)["__spec__"].name == "{name}" and vars(module)["__spec__"].origin == module.__file__
from torch._subclasses.fake_tensor import FakeTensorMode
import torch
with FakeTensorMode():
    print(*torch.nn.functional.conv2d(torch.zeros(1, 3, 8, 8), torch.zeros(4, 3, 3, 3)).shape)
"""
    assert output(program) == "1 4 6 6"
