"""The ranks of one host and their GPUs: which mode can serve them, and each other's staging memory.

Set up by the first collective on CUDA tensors, in steps that all ranks take together; what one rank cannot do
is told to all, and all fall back alike. They speak through the CPU transport, whose waits have deadlines and
see the dead.
"""

from __future__ import annotations

import ctypes
import functools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...errors import TransportError
from . import in_place, p2p
from .decisions import choose_order, decide
from .event_order import EventOrder
from .fused import Fused
from .host_exchange import tell
from .in_place import InPlace
from .order import HostOrder, Order, ValueOrder
from .stream_op import poll

if TYPE_CHECKING:
    from ...call import Call
    from ...config import Config
    from ..base import LocalTransport
    from .driver import Driver


_MOST_BYTES = 8192
_CHECKED = 4096  # bytes at the start of the staging memory that the trial reads
_TRIAL = 5.0
_SIDE_BY_SIDE = 32  # by how much less pays through host memory where ranks share a GPU and take no turns on it
_ORDERS: dict[str, type[Order]] = {o.name: o for o in (HostOrder, ValueOrder, EventOrder)}


@dataclass(frozen=True)
class Mode:
    name: str
    reason: str


def choose(table: Sequence[dict[str, Any]]) -> Mode:
    """The Mode for ranks that said this: a function of them alone, hence alike on all ranks."""
    forced = {w["mode"] for w in table}
    if len(forced) > 1:
        said = ", ".join(f"rank {r}: {w['mode']}" for r, w in enumerate(table))
        raise TransportError(f"C10D_CUSTOM_CUDA_MODE differs between the ranks ({said})")
    for variable in ("staging_bytes", "order", "one_shot_bytes", "in_place_bytes", "host_bytes"):
        if len({w[variable] for w in table}) > 1:
            said = ", ".join(f"rank {r}: {w[variable]}" for r, w in enumerate(table))
            raise TransportError(f"C10D_CUSTOM_CUDA_{variable.upper()} differs between the ranks ({said})")
    wanted = forced.pop()
    crossing = _crossing(table)
    pids = [w["pid"] for w in table]
    gpus = [w["gpu"] for w in table]
    if wanted == "staged":
        return Mode("staged", "C10D_CUSTOM_CUDA_MODE says so")
    if wanted == "auto" and any(w["found_mode"] == "staged" for w in table):
        return Mode("staged", "the probes found that processes here share no GPU memory")
    if len(set(pids)) < len(pids):
        return Mode("staged", "several ranks in one process cannot open each other's memory")
    if len(set(gpus)) == len(gpus) > 1 and not crossing:
        if wanted == "shared":
            return Mode("shared", "C10D_CUSTOM_CUDA_MODE says so")
        return Mode("p2p", "each rank has its own GPU")
    if wanted == "p2p" and len(gpus) > 1:
        raise TransportError(
            f"C10D_CUSTOM_CUDA_MODE=p2p needs a GPU for each rank: here {len(gpus)} ranks share {len(set(gpus))}"
            f"{crossing}"
        )
    if crossing:
        return Mode("shared", f"{len(gpus)} ranks{crossing}")
    return Mode("shared", f"{len(gpus)} ranks on {len(set(gpus))} GPU{'s' if len(set(gpus)) > 1 else ''}")


def _crossing(table: Sequence[dict[str, Any]]) -> str:
    """Whether a rank's GPU is one that another has used before in this group: kernels that wait there could wait in a
    circle. "" if not."""
    for rank, said in enumerate(table):
        for other, earlier in enumerate(table):
            if other != rank and said["gpu"] in earlier["earlier"]:
                return f", and the one that rank {rank} uses now was used by rank {other} before"
    return ""


class Setup:
    """On behalf of ``call``; ``left()``: the seconds it still has; ``stream``: that of the collectives;
    ``helper``: one for what must not wait behind them; ``earlier``: the GPUs that this rank has used before in the
    group. ``opened``: every Peers there has been, for the transport to close."""

    def __init__(
        self,
        cpu: LocalTransport,
        driver: Driver,
        config: Config,
        stream: int,
        helper: int,
        call: Call,
        left: Callable[[], float],
        earlier: Sequence[str] = (),
    ) -> None:
        self._earlier = list(earlier)
        self.cpu, self.driver, self.config = cpu, driver, config
        self.in_place = False  # whether all ranks share a GPU, and map each other's tensors
        self.stream, self.helper, self.call, self._left = stream, helper, call, left
        self.mode: Any = None  # a Mode, once the ranks have said what they are
        self.turns = False  # whether kernels of ranks that share a GPU run one after the other
        self.host_limit = 0  # up to so many bytes a collective goes through host memory (by_size.py)
        self.opened: list[Peers] = []

    def run(self) -> tuple[Mode, Peers | None]:
        """(Mode, Peers or None)"""
        try:
            return self._run()
        finally:
            for peers in self.opened:
                peers.forget_setup()  # and with it the tensors of the call

    def _run(self) -> tuple[Mode, Peers | None]:
        c = self.config
        chosen, why = choose_order(c.cuda_order, self.driver.probed)
        found = decide(self.driver.probed)
        table = self.tell(
            {
                "pid": self.driver.process,
                "gpu": self.driver.uuid,
                "earlier": self._earlier,
                "mode": c.cuda_mode,
                "found_mode": found["mode"].choice,
                "staging_bytes": c.cuda_staging_bytes,
                "order": c.cuda_order,
                "chosen_order": chosen,
                "one_shot_bytes": c.cuda_one_shot_bytes,
                "in_place_bytes": c.cuda_in_place_bytes,
                "host_bytes": c.cuda_host_bytes,
                "side_by_side": self.driver.side_by_side,
                "memory": found["memory"].choice,
            }
        )
        mode = self.mode = choose(table)
        gpus = {w["gpu"] for w in table}
        self.in_place = all(w["memory"] == "mapped" for w in table) and len(gpus) == 1
        if len(gpus) < self.cpu.size:
            self.turns = not all(w["side_by_side"] for w in table)
            self.host_limit = c.cuda_host_bytes // (1 if self.turns else _SIDE_BY_SIDE)
        if mode.name == "staged":
            return mode, None
        if self.cpu.size == 1:
            alone = Peers(self)  # which holds nothing
            alone.forget_setup()
            return mode, alone
        if len({w["chosen_order"] for w in table}) > 1:
            chosen, why = "host", "what the probes found differs between the ranks"
        peers, problem = self._open(_ORDERS[chosen])
        if peers is None and chosen != "host":
            chosen, why = "host", f"{chosen} do not work: {problem}"
            peers, problem = self._open(HostOrder)
        if peers is None:
            return Mode("staged", f"{mode.name} mode does not work: {problem}"), None
        return Mode(mode.name, f"{mode.reason}; ordered by {chosen}: {why}"), peers

    def _open(self, order: type[Order]) -> tuple[Peers | None, str | None]:
        peers = Peers(self)
        self.opened.append(peers)
        handles, problem = self._all(lambda: peers.allocate(order))
        for step in (
            lambda: peers.open(handles or []),
            peers.write_own,
            peers.read_others,
            peers.read_own,
            peers.try_order,
        ):
            if problem is None:
                _, problem = self._all(step)
        if problem is None:
            return peers, None
        peers.let_go(0)
        _, stuck = self._all(self.settle)
        if stuck:
            raise TransportError(f"set-up of CUDA: {problem}; and then {stuck}")
        peers.close_imports()
        self.tell(None)
        peers.free()
        return None, problem

    def _all(self, step: Callable[[], Any]) -> tuple[list[Any] | None, str | None]:
        """Every rank takes a step. (What it gave on each, None), or (None, what went wrong first)."""
        gave, problem = None, None
        try:
            gave = step()
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"[:500]
        said = self.tell([gave, problem])
        problem = next((f"rank {r}: {p}" for r, (_, p) in enumerate(said) if p), None)
        return (None, problem) if problem else ([g for g, _ in said], None)

    def tell(self, mine: Any) -> list[Any]:
        """What every rank says."""
        data = json.dumps(mine).encode()
        if len(data) > _MOST_BYTES:
            raise TransportError(f"set-up of CUDA: {len(data)} bytes to tell, {_MOST_BYTES} at most")
        name = f"{self.call.name} (set-up of CUDA)"
        return [json.loads(said) for said in tell(self.cpu, name, self._left(), data.ljust(_MOST_BYTES))]

    def settle(self) -> None:
        """Waits for what is on the streams."""
        until = time.monotonic() + min(_TRIAL, self._left())
        for stream in (self.stream, self.helper):
            event = self.driver.create_event()
            try:
                self.driver.record(event, stream)
                if not poll(functools.partial(self.driver.done, event), until, self.cpu.broken):
                    raise TransportError("the GPU did not finish the trial in time")
            finally:
                self.driver.destroy_event(event)


class Peers:
    """This rank's staging memory, and the others' as this rank sees it. ``staging``: the address for each rank;
    ``half``: bytes of a half; ``turns``: as the Setup's; ``fused``: in p2p mode, for as many ranks as it takes, a
    Fused; ``in_place``: where all share a GPU and each other's tensors can be mapped, an InPlace. Whoever imports
    closes before the exporter frees."""

    def __init__(self, setup: Setup) -> None:
        self._setup: Any = setup  # until `forget_setup`
        self.driver, self.cpu = setup.driver, setup.cpu
        self.rank, self.size = setup.cpu.rank, setup.cpu.size
        self.half = setup.config.cuda_staging_bytes // 2
        self.turns = setup.turns
        self.staging: dict[int, int] = {}
        self.order: Any = None  # an Order, from `allocate` on
        self.fused: Fused | None = None
        if setup.mode.name == "p2p" and 2 <= self.size <= p2p.MAX_RANKS:
            self.fused = Fused(self.driver, self.rank, self.size, setup.config.cuda_staging_bytes)
        self.in_place: InPlace | None = None
        if setup.in_place and 2 <= self.size <= in_place.MAX_RANKS:
            self.in_place = InPlace(self.cpu, self.driver)
        self._pinned: Any = None  # an address, from `allocate` to `close_imports`

    def allocate(self, order: type[Order]) -> list[Any]:
        """What the others open it by."""
        self._pinned = self.driver.allocate_pinned(2 * _CHECKED)
        self.staging[self.rank] = self.driver.allocate(2 * self.half)
        self.order = order(self.driver, self.rank, self.size, self._setup.helper)
        self.order.prepare()
        if self.fused is not None:
            self.fused.allocate(self._setup.stream)
        self._setup.settle()
        return [
            self.driver.export_memory(self.staging[self.rank]).hex(),
            self.order.handles(),
            self.fused and self.fused.handle(),
        ]

    def open(self, table: Sequence[Any]) -> None:
        for rank, (memory, order, fused) in enumerate(table):
            if rank != self.rank:
                self.staging[rank] = self.driver.open_memory(bytes.fromhex(memory))
                self.order.open(rank, order)
                if self.fused is not None:
                    self.fused.open(rank, fused)

    def forget_setup(self) -> None:
        self._setup = None

    # --- the trial: every rank writes to every rank's memory, and reads from it

    def _pattern(self, writer: int, owner: int) -> bytes:
        return bytes((17 * writer + 31 * owner + i) % 251 for i in range(64))

    def _put(self, at: int, data: bytes) -> None:
        ctypes.memmove(self._pinned, data, len(data))
        self.driver.copy(self._setup.stream, at, self._pinned, len(data))
        self._setup.settle()

    def _expect(self, address: int, data: bytes, what: str) -> None:
        self.driver.copy(self._setup.stream, self._pinned, address, len(data))
        self._setup.settle()
        if ctypes.string_at(self._pinned, len(data)) != data:
            raise TransportError(what)

    def write_own(self) -> None:
        self._put(self.staging[self.rank], self._pattern(self.rank, self.rank))

    def read_others(self) -> None:
        for rank in range(self.size):
            if rank != self.rank:
                self._expect(
                    self.staging[rank],
                    self._pattern(rank, rank),
                    f"rank {self.rank} does not read what rank {rank} has written in its GPU memory",
                )
                self._put(self.staging[rank] + 64 * (1 + self.rank), self._pattern(self.rank, rank))

    def read_own(self) -> None:
        for rank in range(self.size):
            if rank != self.rank:
                self._expect(
                    self.staging[self.rank] + 64 * (1 + rank),
                    self._pattern(rank, self.rank),
                    f"rank {self.rank} does not find what rank {rank} has written in its GPU memory",
                )

    def try_order(self) -> None:
        self.order.trial(self._setup.stream)
        self._setup.settle()

    # --- the end

    def let_go(self, k: int) -> None:
        if self.fused is not None:
            self.fused.let_go()
        if self.order is not None:
            self.order.let_go(k)

    def close_imports(self) -> None:
        if self.in_place is not None:
            self.in_place.close()
        if self.order is not None:
            self.order.close_imports()
        if self.fused is not None:
            self.fused.close_imports()
        mine = self.staging.pop(self.rank, None)
        theirs, self.staging = self.staging, {} if mine is None else {self.rank: mine}
        for address in theirs.values():
            self.driver.close_memory(address)
        if self._pinned is not None:
            self.driver.free_pinned(self._pinned)
            self._pinned = None

    def free(self) -> None:
        if self.order is not None:
            self.order.free()
        if self.fused is not None:
            self.fused.free()
        for address in self.staging.values():
            self.driver.free(address)
        self.staging = {}
