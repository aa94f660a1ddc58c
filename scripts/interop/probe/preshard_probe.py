"""A vLLM plugin for interop_vllm.sh: shows what an engine's workers hold, and lets packed layers run on a CPU.

PROBE_DUMP=DIR: each worker writes its model's state to DIR (a draft's to DIR/mtp) just before
process_weights_after_loading, with vLLM's own writer and file names.
PROBE_GGUF_CPU=1: vllm-gguf-plugin's operators are replaced by slow ones of gguf-py, which decode
the weight and multiply. For checks only.
"""

import os


def register():
    if os.environ.get("PROBE_DUMP"):
        dump(os.environ["PROBE_DUMP"])
    if os.environ.get("PROBE_GGUF_CPU"):
        operators()


def dump(directory):
    from vllm.model_executor.model_loader import base_loader
    from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader

    if hasattr(base_loader, "probed"):
        return
    base_loader.probed = True
    process = base_loader.process_weights_after_loading

    def wrapped(model, model_config, target_device):
        where = os.path.join(directory, "mtp") if "MTP" in type(model).__name__ else directory
        os.makedirs(where, exist_ok=True)
        ShardedStateLoader.save_model(model, where)
        process(model, model_config, target_device)

    base_loader.process_weights_after_loading = wrapped


def operators():
    import gguf
    import numpy
    import torch
    from vllm_gguf_plugin import ops
    from vllm_gguf_plugin.quantization import fused_moe

    def decode(weight, kind):
        blocks = numpy.ascontiguousarray(weight.detach().numpy()).reshape(-1, weight.shape[-1])
        return torch.from_numpy(gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType(int(kind))).copy())

    def dequantize(weight, kind, rows, columns, dtype=None):
        return decode(weight, kind).reshape(rows, columns).to(dtype or torch.float16)

    def multiply(weight, x, kind, rows):
        return (x.float() @ decode(weight, kind).T).to(x.dtype)

    ops.ggml_dequantize = dequantize
    ops.ggml_mul_mat_vec_a8 = ops.ggml_mul_mat_a8 = multiply
    # The fused expert kernels have no such stand-in: send the experts one by one.
    fused_moe.MMQ_QUANT_TYPES = fused_moe.MMVQ_QUANT_TYPES = set()
