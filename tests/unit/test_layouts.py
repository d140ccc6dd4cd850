"""Structs that the core and Python both write down: every field of each is at the same place in all copies, and none is
missing."""

import ctypes
import os
import re
import subprocess
from pathlib import Path

import pytest

from c10d_custom import native
from c10d_custom.native import over_hosts
from c10d_custom.transport import call_log

BACKEND = Path(__file__).resolve().parents[2] / "backend"
# C++ -> (Python, fields that have other names in C++)
PAIRS = {
    "Geometry": (native.Geometry, {}),
    "CpuPlace": (native.CpuPlace, {}),
    "Span": (native.Span, {}),
    "CallArgs": (native.CallArgs, {"inputs": "in", "outputs": "out"}),
    "MessageArgs": (native.MessageArgs, {}),
    "Failure": (native.Failure, {}),
    "Fingerprint": (native.PublishedFingerprint, {}),
    "PeerState": (native.PeerState, {"blocks_in": "in", "blocks_reduced": "red", "blocks_out": "out"}),
    "TraceRecord": (native.TraceRecord, {}),
    "WindowPart": (native.WindowPart, {}),
    "CallHeader": (over_hosts.CallHeader, {}),
    "LeaderAllReduce": (over_hosts.LeaderAllReduce, {}),
    "LeaderCall": (over_hosts.LeaderCall, {}),
    "LeaderFastPath": (over_hosts.LeaderFastPath, {}),
    "Idle": (over_hosts.Idle, {}),
    "Phase": (over_hosts.Phase, {}),
    "PipelinedSlot": (over_hosts.PipelinedSlot, {}),
    "PipelinedReduce": (over_hosts.PipelinedReduce, {}),
    "FailureNews": (over_hosts.FailureNews, {}),
}


def layout(structure):
    """(bytes, [(name, offset, bytes) of each field]) of a ctypes.Structure."""
    fields = [(name, getattr(structure, name)) for name, *_ in structure._fields_]
    return ctypes.sizeof(structure), [(name, f.offset, f.size) for name, f in fields]


def program():
    """C++ that prints the same of the core's structs. A list of as many names as a struct has fields fits no other."""
    lines = ['#include "api.h"', '#include "layout.h"', '#include "../hosts/pipelined_reduce.h"', "#include <cstdio>"]
    lines += ['#include "../hosts/leader_all_reduce.h"', "using namespace c10d_custom;"]
    body = []
    for name, (structure, renamed) in PAIRS.items():
        fields = [renamed.get(n, n) for n, *_ in structure._fields_]
        names = ", ".join(f"f{i}" for i in range(len(fields)))
        lines.append(f"[[maybe_unused]] static void all_of({name}& s) {{ [[maybe_unused]] auto& [{names}] = s; }}")
        body.append(f'  std::printf("{name} %zu\\n", sizeof({name}));')
        body += [f'  std::printf("{name}.{f} %zu %zu\\n", offsetof({name}, {f}), sizeof({name}::{f}));' for f in fields]
    return "\n".join([*lines, "int main() {", *body, "}", ""])


def printed(folder, source):
    (folder / "layouts.cpp").write_text(source)
    compiler = [os.environ.get("CXX", "g++"), "-std=c++17", "-Wno-invalid-offsetof", f"-I{BACKEND / 'shm'}"]
    done = subprocess.run(
        [*compiler, str(folder / "layouts.cpp"), "-o", str(folder / "layouts")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return subprocess.run([str(folder / "layouts")], capture_output=True, text=True, check=True).stdout


def test_every_field_is_where_the_core_has_it(tmp_path):
    expected = ""
    for name, (structure, renamed) in PAIRS.items():
        size, fields = layout(structure)
        expected += f"{name} {size}\n"
        expected += "".join(f"{name}.{renamed.get(field, field)} {at} {of}\n" for field, at, of in fields)
    assert printed(tmp_path, program()) == expected


def test_no_struct_of_the_binding_is_left_out():
    bound = {
        value
        for module in (native, over_hosts)
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, ctypes.Structure) and value is not ctypes.Structure
    }
    assert bound == {structure for structure, _ in PAIRS.values()}


def test_every_status_of_the_core_has_its_number_and_its_word_in_a_trace():
    enum = re.search(r"enum Status : int32_t \{(.*?)\};", (BACKEND / "shm" / "api.h").read_text(), re.DOTALL)
    found = re.findall(r"k(\w+) = (\d+)", enum[1])
    of_core = {re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).upper(): int(code) for name, code in found}
    assert of_core == {name: getattr(native, name, None) for name in of_core} and len(of_core) >= 12
    ended = {name for name, code in of_core.items() if code in call_log._STATES}
    assert of_core.keys() - ended == {"PENDING"}
    assert len(set(call_log._STATES.values()) - set(call_log.UNDER_WAY)) == len(ended)


def read_back(structure, packer):
    """The fields of ``structure`` in what ``packer`` has made of 1, 2, 3 and so on."""
    kinds = re.findall(r"[a-zA-Z]", re.sub(r"\d+x", "", packer.format))
    packed = packer.pack(*(i.to_bytes(8, "little") if kind == "s" else i for i, kind in enumerate(kinds, 1)))
    assert len(packed) == ctypes.sizeof(structure)
    found = structure.from_buffer_copy(packed)
    names = [name for name, *_ in structure._fields_][: len(kinds)]
    return [as_number(getattr(found, name)) for name in names]


def as_number(field):
    if isinstance(field, ctypes.Array):
        return field[0]
    return ctypes.cast(field, ctypes.c_void_p).value if hasattr(field, "contents") else field


@pytest.mark.parametrize("which", ["CallArgs", "CallHeader"])
def test_what_is_packed_by_a_format_is_the_struct(which):
    if which == "CallArgs":
        from c10d_custom.transport.hosts.local_call import _ARGS as packer

        structure = native.CallArgs
    else:
        from c10d_custom.transport.hosts.flat_exchange import _COMPARED
        from c10d_custom.transport.hosts.flat_exchange import _HEADER as packer

        structure = over_hosts.CallHeader
        assert over_hosts.CallHeader.payload.offset == _COMPARED
    values = read_back(structure, packer)
    assert values == list(range(1, len(values) + 1))
    assert len(values) == len([f for f in structure._fields_ if f[0] != "reserved"])


def test_a_field_elsewhere_is_seen(tmp_path):
    """The check itself: fields of one size that change places, and one that is missing."""

    class Swapped(ctypes.Structure):
        _fields_ = [("bytes", ctypes.c_uint64), ("data", ctypes.c_void_p)]

    kept = PAIRS["Span"]
    try:
        PAIRS["Span"] = (Swapped, {})
        assert "Span.bytes 8 8" in printed(tmp_path, program())
        PAIRS["Span"] = (type("Short", (ctypes.Structure,), {"_fields_": Swapped._fields_[:1]}), {})
        with pytest.raises(AssertionError, match="all_of"):
            printed(tmp_path, program())
    finally:
        PAIRS["Span"] = kept
