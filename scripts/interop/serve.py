"""Runs vLLM once on a converted directory, for interop_vllm.sh.

serve.py DIR --tp N --load-format F [--mtp] [--tokens N] [--expect TEXT] [--quantization Q]
Prints the answer, or the tokens, as JSON. Exit status 1 when it is not --expect.
"""

import argparse
import json
import os
import sys

QUESTION = "What is the capital of France? Answer in one sentence."


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("dir")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--load-format", required=True)
    parser.add_argument("--mtp", action="store_true")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--expect")
    parser.add_argument("--quantization")
    args = parser.parse_args()
    # One core per worker, no network, no second look at the processor.
    for name, value in {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }.items():
        os.environ.setdefault(name, value)
    from vllm import LLM, SamplingParams

    options = {}
    if args.quantization:
        options["quantization"] = args.quantization
    if args.mtp:
        draft = {"method": "mtp", "num_speculative_tokens": 1}
        if args.load_format == "sharded_state":  # the draft's parameters are in files of their own
            pattern = "mtp-rank-{rank}-part-{part}.safetensors"
            draft["draft_load_config"] = {
                "load_format": "sharded_state",
                "model_loader_extra_config": {"pattern": pattern},
            }
        options["speculative_config"] = draft
    llm = LLM(
        args.dir,
        tensor_parallel_size=args.tp,
        load_format=args.load_format,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=256,
        enable_prefix_caching=False,
        distributed_executor_backend="mp" if args.tp > 1 else None,
        **options,
    )
    greedy = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=args.expect is None)
    if args.expect is None:
        prompt = {"prompt_token_ids": list(range(3, 19))}
    else:
        chat = [{"role": "user", "content": QUESTION}]
        tokenizer = llm.get_tokenizer()
        ids = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        prompt = {"prompt_token_ids": list(ids)}
    output = llm.generate([prompt], greedy, use_tqdm=False)[0].outputs[0]
    print(
        "ANSWER",
        json.dumps({"text": output.text, "tokens": list(output.token_ids)}),
        flush=True,
    )
    return 0 if args.expect in (None, output.text) else 1


if __name__ == "__main__":
    sys.exit(main())
