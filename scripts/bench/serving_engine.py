"""One engine of vLLM for ``python scripts/bench vllm``, in a process of its own.

    serving_engine.py JSON      # what LLM() takes; with "node_rank" above 0: that host's part of the engine

It answers each line of JSON on its standard input, a function of this file and its arguments, by a line of JSON, and
ends with its input. What vLLM prints goes to standard error."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any


def hello(engine: Any) -> Any:
    """The backends of each rank's groups."""
    return engine.collective_rpc("groups")


def generate(engine: Any, prompts: int, length: int, new: int) -> Any:
    """So many prompts of so many tokens each, all at once: the seconds that it takes to generate so many new ones for
    each, and these tokens."""
    from vllm import SamplingParams

    words = engine.llm_engine.model_config.get_vocab_size()
    drawn = random.Random(prompts)
    inputs = [{"prompt_token_ids": [drawn.randrange(words) for _ in range(length)]} for _ in range(prompts)]
    sampling = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
    begun = time.perf_counter()
    outputs = engine.generate(inputs, sampling, use_tqdm=False)
    seconds = time.perf_counter() - begun
    return {"seconds": seconds, "tokens": [list(output.outputs[0].token_ids) for output in outputs]}


def time_sum(engine: Any, rows: int, times: int) -> Any:
    """Seconds, of the slowest rank."""
    return max(engine.collective_rpc("time_sum", args=(rows, times)))


def _rest_of_an_engine(asked: dict[str, Any]) -> None:
    """What `vllm serve --headless` does on the other hosts."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    executor = MultiprocExecutor(EngineArgs(**asked).create_engine_config(headless=True), monitor_workers=False)
    executor.start_worker_monitor(inline=True)


def main() -> None:
    sys.path.append(str(Path(__file__).parent))  # for vLLM's processes, which import the worker
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    asked = json.loads(sys.argv[1])
    if asked.get("node_rank"):
        return _rest_of_an_engine(asked)
    from vllm import LLM

    engine = LLM(**asked)
    for line in sys.stdin:
        call, arguments = json.loads(line)
        print(json.dumps(globals()[call](engine, **arguments)), file=replies)


if __name__ == "__main__":
    main()
