"""The ranks of one host and their GPUs: which mode can serve them, and each other's staging memory.

Set up by the first collective on CUDA tensors, in steps that all ranks take together; what one rank cannot do
is told to all, and all fall back alike. They speak through the CPU transport, whose waits have deadlines and
see the dead.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ...errors import TransportError
from .algorithm import FUSED_RANKS, HALVES, IN_PLACE_RANKS, Facts
from .fused import Fused
from .host_exchange import tell_json, together
from .in_place import InPlace
from .stream_op import come_to

if TYPE_CHECKING:
    from ...call import Call
    from .host_exchange import Place


# s that a trial has, at most and at least: the least even where late ranks have left nothing of the first call's time.
_TRIAL, _LEAST_TRIAL = 5.0, 1.0
_TIMED = 8 << 20  # bytes of a call whose way through the link is timed, and through host memory
_ALIKE = "mode", "p2p_shared", "staging_bytes", "one_shot_bytes", "in_place_bytes", "host_bytes"  # on all ranks
_CONTAINERS = "Ranks in containers open each other's memory only with one IPC namespace (docker run --ipc=host)"
_HOST_S_OWN = 2.0  # what host memory is to be faster by, for the CPU has a part in that way


@dataclass(frozen=True)
class Mode:
    """``slower``: than what was wanted, or than it could be."""

    name: str
    reason: str
    slower: bool = False


def choose(table: Sequence[dict[str, Any]]) -> Mode:
    """The Mode for ranks that said this: a function of them alone, hence alike on all ranks."""
    for variable in _ALIKE:
        if len({w[variable] for w in table}) > 1:
            said = ", ".join(f"rank {r}: {w[variable]}" for r, w in enumerate(table))
            raise TransportError(f"C10D_CUSTOM_CUDA_{variable.upper()} differs between the ranks ({said})")
    wanted, crossing = table[0]["mode"], _crossing(table)
    pids, gpus = [w["pid"] for w in table], [w["gpu"] for w in table]
    if wanted == "staged":
        return Mode("staged", "C10D_CUSTOM_CUDA_MODE says so")
    if len(set(pids)) < len(pids):
        return Mode("staged", "several ranks in one process cannot open each other's memory", slower=True)
    used, visible = len(set(gpus)), min(w["visible"] for w in table)
    if used == len(gpus) > 1 and not crossing:
        if wanted == "shared":
            return Mode("shared", "C10D_CUSTOM_CUDA_MODE says so")
        return Mode("p2p", "each rank has its own GPU")
    shared = f"{len(gpus)} ranks on {used} GPU{'s' if used > 1 else ''}"
    if wanted == "p2p" and len(gpus) > 1:
        if not table[0]["p2p_shared"] or crossing:
            raise TransportError(f"C10D_CUSTOM_CUDA_MODE=p2p needs a GPU for each rank: here are {shared}{crossing}")
        mps = "is" if all(w["side_by_side"] for w in table) else "is not known to be"
        return Mode("p2p", f"C10D_CUSTOM_CUDA_P2P_SHARED says so ({shared}, where MPS {mps} on)")
    if crossing:
        return Mode("shared", f"{len(gpus)} ranks{crossing}")
    if len(gpus) > used < visible:  # who has one for each rank hardly means this
        hint = f" of {visible}: call torch.cuda.set_device(local rank) before the first tensor"
        return Mode("shared", shared + hint, slower=True)
    return Mode("shared", shared)


def _crossing(table: Sequence[dict[str, Any]]) -> str:
    """Whether a rank's GPU is one that another has used before in this group: kernels that wait there could wait in a
    circle. "" if not."""
    for rank, said in enumerate(table):
        for other, earlier in enumerate(table):
            if other != rank and said["gpu"] in earlier["earlier"]:
                return f", and the one that rank {rank} uses now was used by rank {other} before"
    return ""


class Setup:
    """On behalf of ``call``; ``left()``: the seconds it still has; ``earlier``: the GPUs that this rank has used before
    in the group. ``opened``: every Peers there has been, for the transport to close."""

    def __init__(self, place: Place, call: Call, left: Callable[[], float], earlier: Sequence[str]) -> None:
        self.place, self.cpu, self.driver, self.config = place, place.cpu, place.driver, place.config
        self.stream = place.stream
        self._earlier, self.call, self.left = list(earlier), call, left
        self._name = f"{call.name} (set-up of CUDA)"
        self.together = functools.partial(together, self.cpu, self._name, left)
        self.facts: Any = None  # Facts, once the ranks have said what they are
        self.timed_bytes = 0  # of the calls that are timed; then, too
        self._timed: list[list[Any]] = []  # what the last two steps gave on each rank: time_link and time_host
        self.opened: list[Peers] = []

    def run(self) -> tuple[Mode, Peers | None]:
        c = self.config
        mine = {
            "pid": self.driver.process,
            "gpu": self.driver.uuid,
            "earlier": self._earlier,
            **{variable: getattr(c, f"cuda_{variable}") for variable in _ALIKE},
            "side_by_side": self.driver.side_by_side,
            "visible": self.driver.visible(),
        }
        table = tell_json(self.cpu, self._name, self.left(), mine)
        mode = choose(table)
        size, used = self.cpu.size, Counter(w["gpu"] for w in table)
        self.facts = Facts(
            size,
            gpus=len(used),
            sharers=max(used.values()),
            side_by_side=all(w["side_by_side"] for w in table),
            fused=mode.name == "p2p" and 2 <= size <= FUSED_RANKS,
            in_place=len(used) == 1 and 2 <= size <= IN_PLACE_RANKS,
            half=c.cuda_staging_bytes // HALVES,
        )
        self.timed_bytes = min(_TIMED, self.facts.half) // size * size
        if mode.name == "staged":
            return mode, None
        if self.cpu.size == 1:
            self.opened.append(Peers(self))  # which holds nothing
            return mode, self.opened[-1]
        peers, problem = self._open()
        if peers is not None and self.facts.fused:
            link, host = (max(seconds) * 1e3 for seconds in self._timed)
            said = f"{self.timed_bytes >> 10} KiB take {link:.2f} ms over the slowest link, {host:.2f} by host memory"
            mode = replace(mode, reason=f"{mode.reason}; {said}")
            if c.cuda_mode == "auto" and link > _HOST_S_OWN * host:
                self._close(peers)
                return Mode("staged", mode.reason), None
        if peers is None and self.facts.fused:
            mode = Mode("shared", f"{mode.name} mode does not work: {problem}. {_CONTAINERS}", slower=True)
            self.facts.fused = False
            peers, problem = self._open()
        if peers is None:
            return Mode("staged", f"{mode.name} mode does not work: {problem}. {_CONTAINERS}", slower=True), None
        if peers.in_place is not None and (problem := peers.in_place.try_it(self)):
            return replace(mode, reason=f"{mode.reason}; no collective is done in place: {problem}"), peers
        return mode, peers

    def _open(self) -> tuple[Peers | None, str | None]:
        peers = Peers(self)
        self.opened.append(peers)
        given, problem = self.together(functools.partial(peers.allocate, self))
        steps: list[Callable[[Setup], Any]] = [functools.partial(peers.open, handles=given or [])]
        if peers.fused is not None:
            steps += [peers.fused.try_it, peers.time_link, peers.time_host]
        for step in steps:
            if problem is None:
                gave, problem = self.together(functools.partial(step, self))
                self._timed = [*self._timed[-1:], gave or []]
        if problem is None:
            return peers, None
        self._close(peers, f"{problem}; and then ")
        return None, problem

    def _close(self, peers: Peers, why: str = "") -> None:
        peers.let_go()
        for step in (self.settle, peers.close_imports):
            _, stuck = self.together(step)
            if stuck:
                raise TransportError(f"set-up of CUDA: {why}{stuck}")
        peers.free()

    def trial_seconds(self) -> float:
        """That something tried may take."""
        return max(min(_TRIAL, self.left()), _LEAST_TRIAL)

    def lies(self, address: int, nbytes: int, data: bytes = b"") -> bytes:
        return self.place.lies(address, nbytes, self.trial_seconds(), data)

    def settle(self, more: float = 0.0) -> None:
        """Waits for what is on the stream."""
        until = time.monotonic() + self.trial_seconds() + more
        if not come_to(self.driver, self.stream, until, self.cpu.broken):
            raise TransportError("the GPU did not finish the trial in time")


class Peers:
    """This rank's staging memory, and the others' as this rank sees it. ``staging``: the address for each rank, of the
    halves of the rounds and of what the fused kernels have behind them; ``fused``, ``in_place``: where the Facts are
    such. Whoever imports closes before the exporter frees."""

    def __init__(self, setup: Setup) -> None:
        self.driver, self.cpu = setup.driver, setup.cpu
        self.rank, self.size = setup.cpu.rank, setup.cpu.size
        self.facts: Facts = setup.facts
        self.staging: dict[int, int] = {}
        self.fused = Fused(setup.place, self.facts.sharers) if self.facts.fused else None
        self.in_place = InPlace(setup.place, self.facts) if self.facts.in_place else None

    def allocate(self, setup: Setup) -> str:
        """What the others open it by."""
        rounds, fused = HALVES * self.facts.half, self.fused
        nbytes = rounds + (fused.nbytes if fused is not None else 0)
        own, handle = setup.place.offer(nbytes, setup.trial_seconds())
        self.staging[self.rank] = own
        if fused is not None:
            fused.allocate(setup.stream, own + rounds)
            setup.settle()
        return handle.hex()

    def open(self, setup: Setup, handles: Sequence[str]) -> None:
        for rank, handle in enumerate(bytes.fromhex(h) for h in handles):
            if rank != self.rank:
                self.staging[rank] = setup.place.open_offered(handle, setup.trial_seconds())
        if self.fused is not None:
            self.fused.open([self.staging[rank] + HALVES * self.facts.half for rank in range(self.size)])

    # --- trials

    def time_link(self, setup: Setup) -> float:
        """Seconds of this rank's part in an all_reduce of `timed_bytes`, while all ranks do theirs: over the links."""
        part, own = setup.timed_bytes // self.size, self.staging[self.rank] + self.facts.half
        others = [rank for rank in range(self.size) if rank != self.rank]
        reads = [(own + rank * part, self.staging[rank], part) for rank in others]
        return self._seconds(setup, reads * 2)  # inputs, then results

    def time_host(self, setup: Setup) -> float:
        """The same through host memory, without what the CPU does there."""
        nbytes, own = setup.timed_bytes, self.staging[self.rank]
        host = self.driver.allocate_pinned(nbytes)
        try:
            return self._seconds(setup, [(host, own, nbytes), (own, host, nbytes)])
        finally:
            self.driver.free_pinned(host)

    def _seconds(self, setup: Setup, copies: Sequence[tuple[int, int, int]]) -> float:
        """The second time, as the first may set something up."""
        for _ in range(2):
            began = self.driver.now()
            for copy in copies:
                self.driver.copy(setup.stream, *copy)
            setup.settle()
        return self.driver.now() - began

    # --- the end

    def let_go(self) -> None:
        if self.fused is not None and self.fused.p2p is not None:
            self.fused.p2p.abort(self.cpu.gone())

    def close_imports(self) -> None:
        if self.in_place is not None:
            self.in_place.close()
        if self.fused is not None:
            self.fused.registered.close_imports()
        for rank in [rank for rank in self.staging if rank != self.rank]:
            self.driver.close_memory(self.staging.pop(rank))

    def free(self) -> None:
        if self.in_place is not None:
            self.in_place.free()
        if self.fused is not None:
            self.fused.free()
        for address in self.staging.values():
            self.driver.free(address)
        self.staging = {}
