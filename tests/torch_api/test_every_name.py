"""Every name that this torch offers of a group works on ours, or is refused by an error that says what is refused. A
torch that adds one fails here, and names it."""

import inspect
import re

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend, ProcessGroup

from c10d_custom.c10d.backend import FORWARDED, REGISTERED
from c10d_custom.c10d.process_group import CustomProcessGroup
from ecosystem.spawn import run

from .backends import BACKEND
from .functions import BEFORE, FUNCTIONS, SINCE
from .groups import GROUP, LEFT_TO_TORCH
from .table import Inherited, Place, Refused

TORCH = tuple(int(n) for n in torch.__version__.split(".")[:2])
TABLES = {"torch.distributed": FUNCTIONS, "ProcessGroup": GROUP, "Backend": BACKEND}
GROUP_PARAMETERS = {"group", "parent_pg", "pg", "process_group"}
pytestmark = pytest.mark.skipif("config.getoption('--backend') != 'custom'", reason="of this backend's own classes")


def taking_a_group():
    for name in dir(dist):
        function = getattr(dist, name)
        if (
            not name.startswith("_")
            and inspect.isfunction(function)
            and (GROUP_PARAMETERS | {"ranks_per_subgroup_list"}) & set(inspect.signature(function).parameters)
        ):
            yield name


def names_of(cls):
    return {name for name in vars(cls) if not name.startswith("__") and "pybind11" not in name}


@pytest.mark.parametrize("which", TABLES)
def test_every_name_is_in_its_table(which):
    offered = {
        "torch.distributed": set(taking_a_group()),
        "ProcessGroup": names_of(ProcessGroup),
        "Backend": names_of(Backend),
    }
    missing = offered[which] - TABLES[which].keys()
    assert not missing, f"torch {torch.__version__} offers these of {which}: what do ours do?"


def test_a_group_s_methods_are_its_own():
    """torch's C++ would do for some of them, ten times as slowly, and refuse the others."""
    ours = {
        name for cls in CustomProcessGroup.__mro__ for name in vars(cls) if cls.__module__.startswith("c10d_custom")
    }
    work = {name for name in names_of(ProcessGroup) if not isinstance(GROUP.get(name), Inherited | Refused)}
    missing = work - LEFT_TO_TORCH - ours
    assert not missing


@pytest.mark.skipif(not REGISTERED, reason="torch before 2.14 has no Backend for Python")
def test_a_backend_s_methods_are_its_own():
    from c10d_custom.c10d.backend import CustomBackend

    ours = {name for cls in CustomBackend.__mro__ for name in vars(cls) if cls.__module__.startswith("c10d_custom")}
    work = {name for name in names_of(Backend) if not isinstance(BACKEND.get(name), Inherited | Refused)}
    missing = work - {"rank", "size", "name", "supports_abort_hooks", "supports_completion_hooks", "get_error"} - ours
    assert not missing


def chosen(which, name):
    entry = TABLES[which][name]
    return BEFORE[name] if which == "torch.distributed" and TORCH < SINCE.get(name, TORCH) else entry


def trials(rank, size, which):
    """{name: what is wrong}, of those that this torch has."""
    group = dist.group.WORLD
    place = Place(rank, size, group, group._get_backend(torch.device("cpu")))
    target = {"torch.distributed": (), "ProcessGroup": (group,), "Backend": (place.backend,)}[which]
    has = {"torch.distributed": dist, "ProcessGroup": ProcessGroup, "Backend": Backend}[which]
    wrong = {}
    for name in TABLES[which]:
        entry = chosen(which, name)
        if not hasattr(has, name) or isinstance(entry, Inherited):
            continue
        try:
            if not isinstance(entry, Refused):
                entry(place, *target)
                continue
            try:
                entry.call(place, *target)
                wrong[name] = "is not refused"
            except Exception as error:
                if entry.words not in str(error):
                    wrong[name] = f"is refused with other words: {error}"
        except Exception as error:
            wrong[name] = f"{type(error).__name__}: {error}"
    dist.barrier()
    return wrong


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("which", TABLES)
def test_every_name_does_what_its_table_says(which, size):
    if which == "Backend" and not REGISTERED:
        pytest.skip("torch before 2.14 has no Backend for Python")
    for wrong in run(trials, size, which):
        assert not wrong


@pytest.mark.parametrize("name", [n for n in FORWARDED if hasattr(ProcessGroup, n)])
def test_arguments_have_the_names_that_torch_s_have(name):
    """Of any of its forms, on this torch."""
    ours = inspect.signature(getattr(CustomProcessGroup, name)).parameters
    forms = re.findall(rf"\b{name}\(self: [^\n]*", getattr(ProcessGroup, name).__doc__)
    named = {n for form in forms for n in re.findall(r"[(,] ?(\w+): ", form)} - {"self"}
    assert forms and {n for n in named if not re.fullmatch(r"arg\d+", n)} <= ours.keys()


def test_a_wrong_name_s_error_names_the_operation():
    with pytest.raises(TypeError, match=r"ProcessGroup\.allreduce\(\) got an unexpected keyword argument 'nothing'"):
        CustomProcessGroup.allreduce(None, nothing=1)
