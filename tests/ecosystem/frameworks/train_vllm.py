"""vLLM on a CPU, tensor parallel over 2 ranks: not a training; the tokens that it generates stand for weights. vLLM
starts its ranks itself; what drives them are the processes of this script: rank 0 alone, or each as a host of its own.
"""

import gc
import os
import tempfile
from contextlib import contextmanager
from unittest import mock

import cases
import torch
from cases import case

WORDS = 256
LAUNCHERS = ("RANK", "LOCAL_", "GROUP_", "ROLE_", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_")  # what torchrun has set
ALONE = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler is in this process
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
}


class Asked:
    """What vLLM's workers are asked beside what they do."""

    def backends(self):
        return list(cases.group_names())


def save_model(folder):
    """A small Llama of random weights, large enough that it does not say one token for ever."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=128,
            initializer_range=0.2,
            bos_token_id=None,
            eos_token_id=None,
        )
    ).save_pretrained(folder)


def asked(model, **more):
    return dict(
        model=model,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
        worker_extension_cls="train_vllm.Asked",
        enforce_eager=True,
        max_model_len=128,
        kv_cache_memory_bytes=64 * 2**20,
        disable_log_stats=True,
        **more,
    )


@contextmanager
def by_itself():
    """As where nobody has launched this process: vLLM's workers inherit its environment, and are ranks of their own."""
    with mock.patch.dict(os.environ, ALONE):
        for name in [name for name in os.environ if name.startswith(LAUNCHERS)]:
            del os.environ[name]
        yield


def generated(model, **more):
    """(the tokens, the backends of the workers' groups)"""
    from vllm import LLM, SamplingParams

    with by_itself():
        engine = LLM(**asked(model, **more))
        try:
            prompts = [{"prompt_token_ids": [7 * i % WORDS for i in range(n, 4 * n)]} for n in (1, 5, 20)]
            outputs = engine.generate(
                prompts, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False), use_tqdm=False
            )
            backends = {name for names in engine.collective_rpc("backends") for name in names}
        finally:
            engine.llm_engine.engine_core.shutdown()
            del engine
            gc.collect()
    tokens = [torch.tensor(output.outputs[0].token_ids) for output in outputs]
    assert len(torch.cat(tokens).unique()) > 3, tokens
    return tokens, backends


def driven(name, drive):
    """What rank 0 makes of it, on both."""
    if cases.rank() == 0:
        folder = tempfile.mkdtemp()
        try:
            torch.save(drive(folder), f"{folder}/told")
        finally:
            cases.tell(name, folder)
    tokens, backends = torch.load(f"{cases.told(name)}/told")
    cases.made_of(*backends)
    return tokens


@case
def one_host(backend):
    """Its own kernel makes the sums."""

    def drive(folder):
        save_model(folder)
        return generated(folder)

    return driven("one host", drive)


@case
def two_hosts(backend):
    """It takes each of these processes for a host, and leaves the sums to torch.distributed."""
    where = dict(nnodes=2, master_addr="127.0.0.1", master_port=int(os.environ["MASTER_PORT"]))

    def drive(folder):
        save_model(folder)
        cases.tell("model of two hosts", folder)
        return generated(folder, **where, node_rank=0)

    if cases.rank() == 0:
        return driven("two hosts", drive)
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    args = asked(cases.told("model of two hosts"), **where, node_rank=1)
    with by_itself():
        executor = MultiprocExecutor(EngineArgs(**args).create_engine_config(headless=True), monitor_workers=False)
    try:
        return driven("two hosts", None)
    finally:
        executor.shutdown()


if __name__ == "__main__":
    cases.main()
