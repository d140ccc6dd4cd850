"""Which MPI a group over hosts is to have, decided from what each rank has."""

import pytest

from c10d_custom.creation.mpi_start import _how, _Ranks
from c10d_custom.creation.topology import Location
from c10d_custom.errors import TransportError


def ranks(strangers):
    return _Ranks([Location(name, name, 1, 0, 1, 0) for name in ("a", "b")], [0, 1], strangers)


def launched(*jobs, starts=False):
    return [{"kind": "launcher", "job": job, "starts": starts} for job in jobs]


def test_two_launchers_jobs_are_told_apart():
    with pytest.raises(TransportError, match="b: rank 1: in job 2.*be on one host"):
        _how(launched("slurm.7.0", "slurm.7.1"), ranks(strangers=True))
    assert _how(launched("slurm.7.0", "slurm.7.0"), ranks(strangers=True)) == "launcher"
    assert _how(launched("", ""), ranks(strangers=True)) == "launcher", "Hydra does not name its jobs"
    assert _how(launched("slurm.7.0", ""), ranks(strangers=False)) == "launcher"
    assert _how(launched("", "", starts=True), ranks(strangers=False)) == "launcher starts"


def test_a_group_over_two_jobs_is_to_be_the_first_over_hosts():
    found = [{"kind": "running", "name": "x"}, {"kind": "ready", "MPI": "m", "c10d-custom": "1"}]
    with pytest.raises(TransportError, match="not in one MPI job.*Let that be this one"):
        _how(found, ranks(strangers=True))
    with pytest.raises(TransportError, match="not in one MPI job.*Let that be a group of all ranks"):
        _how(found, ranks(strangers=False))
