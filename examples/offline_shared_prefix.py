# SPDX-License-Identifier: Apache-2.0
"""Two vLLM engines, each in a process of its own, share a prefix through a pool on this host.

``make demo``, or ``python examples/offline_shared_prefix.py`` where vLLM and moonpool are installed. Without
``--model`` it makes a small model with dummy weights, which runs on two CPU cores.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import moonpool
from moonpool.store_client import StoreClient

SHARED_TOKENS = 1536
QUESTION_TOKENS = 40
QUESTIONS = 4
CHUNK_TOKENS = 256
SAVED_SECONDS = 60.0

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 2048,
    "max_position_embeddings": 4096,
    "torch_dtype": "float32",
}


def prompts(first: int) -> list[list[int]]:
    """Return questions about the same document, as token ids: others for every `first`."""
    document = random.Random(0)
    shared = [document.randrange(3, 2000) for _ in range(SHARED_TOKENS)]
    made = []
    for number in range(first, first + QUESTIONS):
        question = random.Random(number)
        made.append(shared + [question.randrange(3, 2000) for _ in range(QUESTION_TOKENS)])
    return made


def engine(arguments: dict[str, Any]) -> None:
    """Be an engine: answer one question after the other, and write how long each first token took."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=arguments["model"],
        skip_tokenizer_init=True,
        load_format=arguments["load_format"],
        dtype="auto",
        enforce_eager=True,
        max_model_len=2048,
        block_size=32,
        kv_transfer_config=arguments["connector"],
    )
    one = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    # What only the first request of a process pays for.
    llm.generate([{"prompt_token_ids": list(range(3, 103))}], one, use_tqdm=False)
    answers = []
    for tokens in arguments["prompts"]:
        begun = time.perf_counter()
        (output,) = llm.generate([{"prompt_token_ids": tokens}], one, use_tqdm=False)
        answers.append(
            {
                "first_token": time.perf_counter() - begun,
                "cached": output.num_cached_tokens or 0,
                "tokens": list(output.outputs[0].token_ids),
            }
        )
        # Its own prefix cache would hide what the pool does.
        llm.reset_prefix_cache()
    Path(arguments["answers"]).write_text(json.dumps(answers), encoding="utf-8")
    if arguments["connector"] is not None:
        # It saves in the background, and may end once the pool has what the other engine is to find.
        with StoreClient(**arguments["store_client"]) as client:
            end = time.monotonic() + SAVED_SECONDS
            while client.master_stats()["index"]["chunks"] < SHARED_TOKENS // CHUNK_TOKENS:
                if time.monotonic() > end:
                    sys.exit("the pool has not got the prefix")
                time.sleep(0.05)


def run(folder: Path, model: str, load_format: str, first: int, store_client: dict[str, Any] | None) -> list[Any]:
    """Run an engine in a process of its own, with a pool or without, and return its answers."""
    connector = store_client and {
        "kv_connector": "MoonpoolConnector",
        "kv_connector_module_path": "moonpool.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"chunk_tokens": CHUNK_TOKENS, "store_client": store_client},
    }
    answers = folder / "answers.json"
    arguments = {
        "model": model,
        "load_format": load_format,
        "prompts": prompts(first),
        "connector": connector,
        "store_client": store_client,
        "answers": str(answers),
    }
    variables = {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # One process is enough for each engine.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    done = subprocess.run(
        [sys.executable, __file__, "--engine", json.dumps(arguments)],
        env={**variables, **os.environ},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"an engine failed:\n{done.stdout}\n{done.stderr}")
    return list(json.loads(answers.read_text(encoding="utf-8")))


def main() -> None:
    """Run the engines and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model that vLLM can load; its vocabulary has 2,000 tokens or more")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.engine:
        engine(json.loads(given.engine))
        return
    with tempfile.TemporaryDirectory() as name, moonpool.local_cluster(nodes=1, dram="256MiB") as cluster:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
        model, load_format = (given.model, "auto") if given.model else (name, "dummy")
        pool = {"master": cluster.master, **cluster.client_options}
        print(f"{QUESTIONS} questions about a document of {SHARED_TOKENS} tokens; engines keep nothing between them")
        print(f"{'':34}{'hit rate':>10}{'time to first token':>22}")
        rows = {
            "engine A, which fills the pool": run(folder, model, load_format, 0, pool),
            "engine B without the pool": run(folder, model, load_format, 100, None),
            "engine B with the pool": run(folder, model, load_format, 100, pool),
        }
        for label, answers in rows.items():
            cached = sum(answer["cached"] for answer in answers)
            rate = cached / (len(answers) * (SHARED_TOKENS + QUESTION_TOKENS))
            first = statistics.median(answer["first_token"] for answer in answers)
            print(f"{label:34}{rate:>10.0%}{first * 1000:>19.0f} ms")
        without, with_ = (
            [answer["tokens"] for answer in rows[f"engine B {how} the pool"]] for how in ("without", "with")
        )
        if without != with_:
            sys.exit("the tokens are not the same")
        print("the tokens are the same with and without")


if __name__ == "__main__":
    main()
