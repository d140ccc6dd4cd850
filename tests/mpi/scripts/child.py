"""A rank starts a subprocess, which inherits the launcher's variables but is no rank."""

import json
import os
import subprocess
import sys

CHILD = """
import os, json, torch
from c10d_custom.launch import launcher
print(json.dumps([repr(launcher.detect()), os.environ.get("RANK"), "PMI_RANK" in os.environ]))
"""
# Without what fill_environment set here, should sitecustomize or the like have imported torch.
env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
out = subprocess.run(
    [sys.executable, "-c", CHILD], env=env, capture_output=True, text=True, check=True, timeout=50
).stdout
import torch  # noqa: F401 - the rank itself

print(json.dumps({"rank": int(os.environ["RANK"]), "child": json.loads(out)}), flush=True)
