#!/usr/bin/env python3
"""What every rank of vLLM holds after vLLM's own loader has read an ordinary checkpoint.

  vllm_state.py CHECKPOINT OUT.json [--run TP] [--run TPep] … [--draft]

Builds the class that config.json names, without an engine, on gloo ranks of this machine, calls its
load_weights() on the checkpoint, and lists each tensor that --load-format sharded_state looks for as
"DTYPE [shape] hash" (20 digits of BLAKE3): names, shapes, dtypes and bytes all come from vLLM.
--draft: its multi-token-prediction draft too. Needs vLLM 0.32 for CPUs and blake3.
"""
import argparse, glob, json, os, sys, tempfile

ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
ap.add_argument("checkpoint")
ap.add_argument("out")
ap.add_argument("--run", action="append", default=[])
ap.add_argument("--draft", action="store_true")
a = ap.parse_args()
for key, value in dict(VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1", GLOO_SOCKET_IFNAME="lo", VLLM_HOST_IP="127.0.0.1",
                       VLLM_LOGGING_LEVEL="ERROR", VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS="1").items():
    os.environ.setdefault(key, value)
import torch
from blake3 import blake3
from safetensors.torch import load_file
from vllm.config import set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model_architecture
from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader

KINDS = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float16: "F16", torch.uint8: "U8", torch.int32: "I32"}


def sparse_without_kernels():
    """Sparse attention has no CPU kernels: a backend that survives being built, as only parameters matter here."""
    import vllm.model_executor.layers.attention.mla_attention as mla
    import vllm.model_executor.layers.sparse_attn_indexer as indexer
    import vllm.models.deepseek_v32.nvidia.model as trunk
    import vllm.models.deepseek_v32.nvidia.mtp as draft
    import vllm.v1.attention.backends.mla.indexer as backend

    class Impl:
        is_sparse = True; supports_dense_mha_prefill = False; dcp_world_size = pcp_world_size = 1
        supports_quant_query_input = False; lse_base_on_e = True
        def __init__(self, *args, **kwargs): self.index_group = None

    class Backend:
        get_name = staticmethod(lambda: "NONE"); is_mla = staticmethod(lambda: True)
        get_impl_cls = staticmethod(lambda: Impl); get_supported_kernel_block_sizes = staticmethod(lambda: [64])

    mla.get_attn_backend = lambda *args, **kwargs: Backend
    mla._canonicalize_sparse_mla_kv_cache_dtype = lambda backend, dtype: dtype
    indexer.SparseAttnIndexer.__init__ = lambda self, *args, **kwargs: torch.nn.Module.__init__(self)
    backend.get_max_prefill_buffer_size = lambda config: 1024
    for module in (trunk, draft):
        for name, fake in (("SparseMLAIndexGroupBuilder", None), ("get_sparse_mla_index_group_max_rows", 1)):
            if hasattr(module, name): setattr(module, name, lambda *args, fake=fake, **kwargs: fake)
    return trunk.DeepseekV32ForCausalLM, draft.DeepseekV32MTP


def listing(model):
    lines = {}
    for name, t in ShardedStateLoader._filter_subtensors(model.state_dict()).items():
        words = t.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        lines[name] = f"{KINDS[t.dtype]} [{'x'.join(map(str, t.shape))}] {blake3(words).hexdigest()[:20]}"
    return lines


def rank_state(tp, ep, rank, port):
    """The tensors of one rank, by file: `model`, and `mtp`."""
    with open(a.checkpoint + "/config.json") as f:
        described = json.load(f)
    classes = sparse_without_kernels() if "index_topk" in described else (None, None)
    more = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}} if a.draft else {}
    config = EngineArgs(model=a.checkpoint, tensor_parallel_size=tp, enable_expert_parallel=ep, dtype="bfloat16", enforce_eager=True,
                        max_model_len=256, max_num_batched_tokens=256, max_num_seqs=4, skip_tokenizer_init=True,
                        distributed_executor_backend="mp" if tp > 1 else None, **more).create_engine_config()
    found = {}
    with set_current_vllm_config(config):
        init_distributed_environment(world_size=tp, rank=rank, distributed_init_method=f"tcp://127.0.0.1:{port}", local_rank=rank, backend="gloo")
        ensure_model_parallel_initialized(tp, 1)
    for part in ("model", "mtp") if a.draft else ("model",):
        one = config
        if part == "mtp":
            import copy
            one = copy.copy(config)
            one.model_config = config.speculative_config.draft_model_config
            if one.model_config.hf_text_config.model_type == "qwen3_5_mtp":
                # vLLM 0.32 renames the model for its draft, which its own layers then refuse where config.json has
                # no vision part to keep the old name in.
                one.model_config.hf_text_config.model_type = described["model_type"]
        weights = load_file(a.checkpoint + "/model.safetensors")
        if part == "mtp":
            # Where the draft has no embedding and head of its own it computes with the trunk's.
            last = f"model.layers.{described['num_hidden_layers']}."
            for own, trunk in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
                if f"{last}eh_proj.weight" in weights:
                    weights.setdefault(f"{last}{own}.weight", weights[f"{trunk}.weight"])
        with set_current_vllm_config(one):
            cls = classes[part == "mtp"] or get_model_architecture(one.model_config)[0]
            torch.set_default_dtype(torch.bfloat16)
            model = cls(vllm_config=one)
            torch.set_default_dtype(torch.float32)
            model.load_weights(iter(weights.items()))
        found[part] = listing(model)
        if rank == 0: print(f"  vLLM {cls.__name__} tp {tp}{' ep' if ep else ''}: {len(found[part])} tensors")
    return found


def run(text, port):
    """All ranks, each a process of its own that has everything imported already."""
    tp, ep = int(text.removesuffix("ep")), text.endswith("ep")
    os.environ["VLLM_DIST_IDENT"] = f"state{port}"
    with tempfile.TemporaryDirectory() as work:
        children = []
        for rank in range(tp):
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    found = rank_state(tp, ep, rank, port)
                    with open(f"{work}/{rank}", "w") as f: json.dump(found, f)
                    code = 0
                except BaseException:
                    import traceback
                    traceback.print_exc()
                sys.stdout.flush(); sys.stderr.flush()
                os._exit(code)
            children.append(child)
        failed = [os.waitpid(child, 0)[1] for child in children]
        for left in glob.glob(f"/dev/shm/*state{port}*"): os.remove(left)
        if any(failed): sys.exit(f"a rank of {text} failed")
        return {f"{part}-rank-{r}-part-0.safetensors": tensors
                for r in range(tp) for part, tensors in json.load(open(f"{work}/{r}")).items()}


cases = {}
for i, text in enumerate(a.run):
    case = f"--tp {text.removesuffix('ep')}{' --ep' if text.endswith('ep') else ''} --weights bf16"
    cases[case] = run(text, 29700 + os.getpid() % 200 * 4 + i)
with open(a.out, "w") as f:
    json.dump(cases, f)
