"""Starts commands on hosts of a rig, and waits for them: agents.py SSH TMPDIR VARIABLE... [-- HOST COMMAND...]...

They get these variables of its environment, and its folder. Its exit status is the first that is not 0."""

import os
import shlex
import subprocess
import sys
import time


def main():
    words, parts = sys.argv[1:], [[]]
    for word in words:
        if word == "--":
            parts.append([])
        else:
            parts[-1].append(word)
    (ssh, tmpdir, *names), *agents = parts
    variables = [f"TMPDIR={tmpdir}", *(f"{name}={os.environ[name]}" for name in names)]
    enter = shlex.join(["env", "--chdir", os.getcwd(), *variables])
    running = [
        subprocess.Popen([ssh, host, f"exec {enter} {shlex.join(command)}"], stdin=subprocess.DEVNULL)
        for host, *command in agents
    ]
    status = 0
    while running:
        time.sleep(0.02)
        for agent in [agent for agent in running if agent.poll() is not None]:
            running.remove(agent)
            status = status or agent.returncode
    sys.exit(status if status >= 0 else 128 - status)


if __name__ == "__main__":
    main()
