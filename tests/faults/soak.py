"""Hours of random collectives on random groups, with ranks killed at random moments.

    python tests/faults/soak.py --minutes 20 --seed 1

The run goes through lives, of 4 and of 8 ranks by turns. In each, ranks make groups (new_group, split_group), use them
and the world at random, check every result bit by bit, and destroy them; some are killed, one alone or several within
milliseconds, so also while the rest deal with the death before. The rest shrink the world and go on, until the life is
over. Then the killed are replaced by new processes for the next life. Two processes, the elders, are never killed, with
whatever ranks: they must hold no more threads, descriptors, segments and memory after the last life than after the
first ones.

Prints a report of one line of JSON; the exit code tells whether all was well.
"""

import argparse
import json
import mmap
import os
import random
import signal
import statistics
import sys
import time
from datetime import timedelta

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # what torch's store says of lost connections

import torch
import torch.distributed as dist
from belongings import IDLE, belongings, own_bytes
from forked import ForkedRanks, serve_store, store_at
from steps import one_step

import c10d_custom

ELDERS = 2
WORLDS = (4, 8)
TIMEOUT = timedelta(seconds=60)
LIFE_LIMIT = 120.0  # s: for a life to come to its end
WARM_UP = 3  # lives before the first measurement
GROWTH = 8 << 20  # bytes of own memory that an elder may have more at the end than at the start


# --- one process


class Life:
    """A world's, in one process, until the flag says that it is over."""

    def __init__(self, number, rank, size, seed, port, over):
        self.number, self.seed, self.over = number, seed, over
        self.steps = self.shrunk = self.made = 0
        dist.init_process_group(
            "custom", store=store_at(port, f"life{number}"), rank=rank, world_size=size, timeout=TIMEOUT
        )
        self.members = list(range(size))  # of the world now, by the ranks they began with

    def run(self):
        while True:
            try:
                self._until_over()
                return
            except dist.DistError:
                c10d_custom.shrink_group(timedelta(seconds=30))
                self.shrunk += 1

    def _until_over(self):
        """Everything drawn is drawn alike by all ranks of the world: from what they have in common."""
        rng = random.Random(f"{self.seed}.{self.number}.{dist.get_world_size()}")
        groups = []
        for step in range(1 << 30):
            if step % 8 == 0 and self._all_over():
                return
            choice = rng.random()
            if choice < 0.06 and len(groups) < 4:
                groups.append(self._new_group(rng))
            elif choice < 0.1 and groups:
                self._drop(groups.pop(rng.randrange(len(groups))))
            else:
                group = rng.choice([None, *groups])
                seed = rng.random()
                if group is not dist.GroupMember.NON_GROUP_MEMBER:
                    self._step(random.Random(seed), step, group)

    def _step(self, rng, step, group):
        if wrong := one_step(rng, step, group):
            raise AssertionError(f"life {self.number}: {wrong}")
        self.steps += 1

    def _new_group(self, rng):
        self.made += 1
        ranks = rng.sample(range(dist.get_world_size()), rng.randint(1, dist.get_world_size()))
        if rng.random() < 0.7:
            return dist.new_group(ranks)
        # Messages and collectives of a group made by the group's own method, which torch's functions do not know.
        split = dist.group.WORLD.split_group(ranks)
        if split is not None:
            value = torch.arange(1000) + split.rank()
            split.allreduce(value).wait()
            n = split.size()
            if not torch.equal(value, n * torch.arange(1000) + n * (n - 1) // 2):
                raise AssertionError(f"life {self.number}: split_group, all_reduce: wrong result")
            split.shutdown()
        return dist.GroupMember.NON_GROUP_MEMBER

    @staticmethod
    def _drop(group):
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)

    def _all_over(self):
        over = torch.tensor([self.over[0]])
        dist.all_reduce(over, dist.ReduceOp.MIN)
        return bool(over)


def process(index, say, orders, port, over):
    """Lives one life after the other, each as ordered by a line on its pipe."""
    # The first store that a process serves leaves it a pipe for good: libuv's.
    dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    for line in os.fdopen(orders[index][0]):
        order = json.loads(line)
        if not order:
            return
        life = Life(order["life"], order["rank"], order["size"], order["seed"], port, over)
        say(began=order["life"])  # a death before it ends the life of a world that is not there yet: lost_ranks.py
        life.run()
        survivors = dist.get_world_size()
        dist.destroy_process_group()
        time.sleep(IDLE + 0.3)
        say(
            life=order["life"],
            steps=life.steps,
            shrunk=life.shrunk,
            made=life.made,
            survivors=survivors,
            held=belongings(),
            memory=own_bytes(),
        )


# --- the run


class Soak:
    def __init__(self, seed, worlds):
        self.seed, self.worlds = seed, worlds
        self.over = mmap.mmap(-1, 4096)
        self.orders = []
        port = serve_store()
        self.ranks = ForkedRanks(0, process, self.orders, port, self.over)
        self.alive = []
        self.lives = self.killed = self.steps = self.shrunk = self.groups = 0
        self.held, self.wrong = {i: [] for i in range(ELDERS)}, []

    def _start(self):
        self.orders.append(os.pipe())
        self.ranks.start()
        self.alive.append(len(self.ranks.pids) - 1)

    def live(self, seconds):
        """One life. False: something was wrong."""
        rng = random.Random(f"{self.seed}.{self.lives}")
        size = self.worlds[self.lives % len(self.worlds)]
        while len(self.alive) < size:
            self._start()
        for spare in self.alive[size:]:
            os.write(self.orders[spare][1], b"null\n")
        members, self.alive = self.alive[:size], self.alive[:size]
        self.over[0] = 0
        for process, rank in zip(members, rng.sample(range(size), size)):
            order = {"life": self.lives, "rank": rank, "size": size, "seed": self.seed}
            os.write(self.orders[process][1], json.dumps(order).encode() + b"\n")
        began = [self.ranks.said[p] for p in members]
        self.ranks.listen(lambda: all(s.get("began") == self.lives or "raised" in s for s in began), LIFE_LIMIT)
        self._kill(rng, seconds)
        self.over[0] = 1
        said = [self.ranks.said[p] for p in self.alive]
        ended = self.ranks.listen(lambda: all(s.get("life") == self.lives or "raised" in s for s in said), LIFE_LIMIT)
        for process, s in zip(self.alive, said):
            if "raised" in s:
                self.wrong.append(f"life {self.lives}, process {process}: {s['raised']}")
            elif s.get("life") != self.lives:
                self.wrong.append(f"life {self.lives}, process {process}: not over after {LIFE_LIMIT:g} s")
            elif s["survivors"] != len(self.alive):
                self.wrong.append(
                    f"life {self.lives}, process {process}: a world of {s['survivors']}, of {len(self.alive)} survivors"
                )
        if self.wrong or not ended:
            return False
        self.steps += sum(s["steps"] for s in said)
        self.shrunk += said[0]["shrunk"]
        self.groups += said[0]["made"]
        for elder in range(ELDERS):
            self.held[elder].append((self.ranks.said[elder]["held"], self.ranks.said[elder]["memory"]))
        self.lives += 1
        return True

    def _kill(self, rng, seconds):
        """Sleeps for that long, and kills at times; in bursts, so that a death comes amid the dealing with another."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self.ranks.listen(lambda: False, min(left, rng.expovariate(3.0 / seconds)))
            victims = [p for p in self.alive if p >= ELDERS]
            for victim in rng.sample(victims, min(len(victims), rng.choice((0, 1, 1, 1, 2, 3)))):
                os.kill(self.ranks.pids[victim], signal.SIGKILL)
                self.alive.remove(victim)
                self.killed += 1
                time.sleep(rng.uniform(0, 0.02))

    def end(self):
        for process in self.alive:
            os.write(self.orders[process][1], b"null\n")
        stuck = self.ranks.finish(10)
        if stuck:
            self.wrong.append(f"processes that did not end: {stuck}")
        self._require_flat()

    def _require_flat(self):
        for elder, seen in self.held.items():
            if len(seen) <= WARM_UP:
                self.wrong.append(f"only {len(seen)} lives: too few to tell whether anything grows")
                continue
            first, last = seen[WARM_UP - 1][0], seen[-1][0]
            if first != last:
                self.wrong.append(f"elder {elder} held {first} after life {WARM_UP}, {last} at the end")
            if (grown := self.growth(elder)) > GROWTH:
                self.wrong.append(f"elder {elder}: own memory has grown by {grown >> 10} KiB")

    def growth(self, elder):
        memory = [m for _, m in self.held[elder][WARM_UP - 1 :]]
        third = max(1, len(memory) // 3)
        return int(statistics.median(memory[-third:]) - statistics.median(memory[:third]))


def main():
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--minutes", type=float, default=20)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--ranks", default=",".join(map(str, WORLDS)), help="world sizes, by turns")
    options.add_argument("--life", type=float, default=3.0, help="seconds of one life")
    given = options.parse_args()
    torch.set_num_threads(1)
    soak = Soak(given.seed, [int(n) for n in given.ranks.split(",")])
    began = time.monotonic()
    while (time.monotonic() < began + 60 * given.minutes or soak.lives <= WARM_UP + 1) and soak.live(given.life):
        pass
    soak.end()
    print(*soak.wrong, sep="\n", file=sys.stderr, end="")
    held = [h for h, _ in soak.held[0]]
    print(
        json.dumps(
            {
                "seconds": round(time.monotonic() - began),
                "lives": soak.lives,
                "operations": soak.steps,
                "killed": soak.killed,
                "shrunk": soak.shrunk,
                "groups": soak.groups,
                "elders held": [held[WARM_UP - 1], held[-1]] if len(held) > WARM_UP else held,
                "elders grew by KiB": [soak.growth(e) >> 10 for e in soak.held] if len(held) > WARM_UP else None,
                "wrong": len(soak.wrong),
            }
        )
    )
    sys.exit(bool(soak.wrong))


if __name__ == "__main__":
    main()
