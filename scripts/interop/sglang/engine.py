"""What SGLang's own loaders make of a directory, on a CPU, for interop_sglang.sh.

Each line of standard input is one run: STATE DIR [OPTIONS]. The ranks are processes that talk through gloo. Each
writes the model's parameters to STATE/model-rank-R-part-0.safetensors, and what SGLang derives from them after
loading (w_kc and w_vc) to STATE/derived-rank-R.safetensors. The state of a run that is refused is the text of the
error, in STATE/refused-R. Prints one line for each run; exit status 1 when a run was refused.
"""

import argparse
import os
import pathlib
import shlex
import shutil
import sys
import traceback

import absent  # noqa: F401
import torch


def options():
    parser = argparse.ArgumentParser()
    parser.add_argument("state", type=pathlib.Path)
    parser.add_argument("dir")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--ep", action="store_true")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--draft", action="store_true")
    parser.add_argument("--shared-experts", choices=["fused", "separate"], default="separate")
    parser.add_argument("--indexer", choices=["fused", "separate"], default="separate")
    parser.add_argument("--dp-attention", action="store_true")
    parser.add_argument("--quantization")
    return parser


def pretend(args):
    """Takes out what only a GPU can do. Fusions are decided as on one where they are asked for."""
    import sglang.srt.layers.rotary_embedding.factory as rope
    from sglang.srt.distributed import parallel_state

    def get_rope_cpu(
        head_size,
        rotary_dim,
        max_position,
        base,
        is_neox_style=True,
        rope_scaling=None,
        dtype=None,
        partial_rotary_factor=1.0,
        device=None,
    ):
        return rope.get_rope(
            head_size,
            rotary_dim,
            max_position,
            base,
            is_neox_style,
            rope_scaling,
            dtype,
            partial_rotary_factor,
        )

    rope.get_rope_cpu = get_rope_cpu

    class Properties:
        total_memory, major, minor, name, multi_processor_count = 80 << 30, 9, 0, "none", 132

    torch.cuda.get_device_capability = lambda *a, **k: (9, 0)
    torch.cuda.get_device_properties = lambda *a, **k: Properties()
    build = parallel_state.GroupCoordinator.__init__

    def without(self, *positional, **named):
        for name in (
            "use_pynccl",
            "use_custom_allreduce",
            "use_pymscclpp",
            "use_torch_symm_mem_all_reduce",
            "use_message_queue_broadcaster",
        ):
            if name in named:
                named[name] = False
        return build(self, *positional, **named)

    parallel_state.GroupCoordinator.__init__ = without
    if args.indexer == "fused":
        import sglang.srt.layers.attention.dsa.dsa_indexer as indexer

        build_indexer = indexer.Indexer.__init__

        def fused(self, *positional, **named):
            indexer._is_cuda = True
            indexer.resolve_num_sms = lambda *a, **k: 132
            try:
                build_indexer(self, *positional, **named)
            finally:
                indexer._is_cuda = False

        indexer.Indexer.__init__ = fused


def run(args, rank, port):
    from safetensors.torch import save_file

    torch.set_num_threads(1)
    pretend(args)
    from sglang.srt.server_args import ServerArgs

    more = {}
    if args.ep:
        more["ep_size"] = args.tp
    if args.dp_attention:
        more.update(dp_size=args.tp, enable_dp_attention=True)
    if args.quantization:
        more["quantization"] = args.quantization
    if args.shared_experts == "fused":
        more["enforce_shared_experts_fusion"] = True
    server = ServerArgs(
        model_path=args.dir,
        tp_size=args.tp,
        device="cpu",
        dtype="bfloat16",
        load_format=args.load_format,
        skip_tokenizer_init=True,
        disable_shared_experts_fusion=args.shared_experts == "separate",
        attention_backend="torch_native",
        **more,
    )
    from sglang.srt.runtime_context import publish

    try:
        from sglang.srt.runtime_context import SpawnRanks
    except ImportError:
        from sglang.srt.weight_cache.daemon import SpawnRanks
    from sglang.srt.weight_cache.daemon import spawn_world_rank

    place = spawn_world_rank(server, tp_rank=rank, pp_rank=0)
    publish(server, role="weight_cache_daemon", ranks=SpawnRanks(world_rank=place, gpu_id=rank))
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
    from sglang.srt.layers.dp_attention import init_dp_gathered_buffer, initialize_dp_attention
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.model_loader import loader as loaders

    initialize_moe_config()
    config = ModelConfig(
        model_path=args.dir,
        trust_remote_code=False,
        dtype="bfloat16",
        is_draft_model=args.draft,
        quantization=args.quantization,
    )
    init_distributed_environment(
        world_size=args.tp,
        rank=rank,
        distributed_init_method=f"tcp://127.0.0.1:{port}",
        local_rank=rank,
        backend="gloo",
    )
    initialize_model_parallel()
    initialize_dp_attention(server)
    init_dp_gathered_buffer(config)
    loader = loaders.get_model_loader(LoadConfig(load_format=args.load_format), config)
    model = loader.load_model(model_config=config, device_config=DeviceConfig("cpu", rank))
    state = loaders.ShardedStateLoader._filter_subtensors(model.state_dict())
    save_file(
        {k: v.contiguous() for k, v in state.items()}, args.state / f"model-rank-{rank}-part-0.safetensors"
    )
    derived = {
        k: v.contiguous()
        for k, v in loaders.PreshardedModelLoader._collect_extra_tensors(model).items()
        if k.endswith((".w_kc", ".w_vc"))
    }
    save_file(derived, args.state / f"derived-rank-{rank}.safetensors")
    return type(model).__name__


def main():
    # Once for all runs: what follows forks.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import sglang.srt.model_loader.loader
    import sglang.srt.server_args  # noqa: F401
    from sglang.srt.plugins import load_plugins

    load_plugins()

    refused = 0
    port = 29500 + os.getpid() % 2000
    for line in sys.stdin:
        args = options().parse_args(shlex.split(line))
        shutil.rmtree(args.state, ignore_errors=True)
        args.state.mkdir(parents=True)
        port += 1
        children = []
        for rank in range(args.tp):
            child = os.fork()
            if child == 0:
                log = os.open(args.state / f"log-{rank}", os.O_WRONLY | os.O_CREAT, 0o644)
                os.dup2(log, 1)
                os.dup2(log, 2)
                status = 1
                try:
                    print("CLASS", run(args, rank, port), flush=True)
                    status = 0
                except Exception as e:  # noqa: BLE001 (whatever the engine says is the result)
                    traceback.print_exc()
                    (args.state / f"refused-{rank}").write_text(f"{type(e).__name__}: {e}\n")
                finally:
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(status)
            children.append(child)
        status = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        text = "loaded"
        if any(status):
            refused += 1
            first = sorted(args.state.glob("refused-*"))
            text = "refused: " + (first[0].read_text().splitlines()[0] if first else f"exit {status}")
        print(args.state, text, flush=True)
    return int(refused > 0)


if __name__ == "__main__":
    sys.exit(main())
