"""Where a sandbox refuses a call, on both ranks: a group works, or says which call it is. See refused_calls.py."""

import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("refused_calls.py")

# What there is no other way for -> what the error of both ranks says. All else goes on as if nothing were.
NAMED = {
    "bind EPERM": "bind: ",
    "bind ENOSYS": "bind: ",
    "fallocate madvise EPERM": "fallocate: ",
    "fallocate madvise ENOSYS": "fallocate: ",
    "fchmod EPERM": "fchmod: ",
    "fchmod ENOSYS": "fchmod: ",
    "ftruncate EPERM": "ftruncate: ",
    "ftruncate ENOSYS": "ftruncate: ",
    "recvmsg EPERM": "recvmsg: ",
    "recvmsg ENOSYS": "recvmsg: ",
    "sendmsg EPERM": "sendmsg: ",
    "sendmsg ENOSYS": "sendmsg: ",
    "setsockopt EPERM": "setsockopt: ",
    "setsockopt ENOSYS": "setsockopt: ",
    "socket EPERM": "socket: ",
    "socket ENOSYS": "socket: ",
}


@pytest.mark.timeout(200)
@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="the numbers of system calls")
def test_each_call_is_done_without_or_named():
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    results, wrong = json.loads(done.stdout.splitlines()[-1]), {}
    assert len(results) > 90 and {*NAMED, "clone3 EPERM"} < set(results)
    for calls, result in results.items():
        named = NAMED.get(calls)
        for said in result["said"]:
            good = said.get("done") if named is None else named in said.get("error", "")
            if result["stuck"] or result["codes"] != [0, 0] or not good or said["seconds"] > 10:
                wrong[calls] = result
    assert not wrong
