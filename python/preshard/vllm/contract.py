"""What the plugin needs to know of a vLLM version, and what it refuses whatever the version.

A version's file gives:

- ``register()``: makes the load format known to vLLM;
- a loader whose steps are: read the manifest, :func:`check` it against the engine's parallelism,
  build the model with :func:`preshard.bind.released` (packed layers through :class:`Packing`),
  :func:`preshard.plugin.fill` it from this rank's file;
- an ``install`` function that puts a packed tensor, its types and the rows of its members into a
  layer, in the form in which that version's packed layers expect them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..errors import ShardsError
from ..manifest import Manifest, ShardEntry, TensorEntry
from ..plugin import Problems


@dataclass(frozen=True)
class Engine:
    """What the engine runs, as far as it decides which file fits."""

    tp: int
    pp: int
    ep: bool
    dp: int
    class_names: tuple[str, ...]
    """``architectures`` of the model's config; empty for a draft."""
    quantization: str | None
    """Quantisation that the user or config.json asked for."""


def check(directory: str, manifest: Manifest, engine: Engine) -> None:
    """Refuses a directory that was not converted for this engine; all reasons at once."""
    policy, problems = manifest.policy, Problems(directory, manifest)
    problems.layout("vllm")
    problems.differs(
        "tensor parallel size",
        policy.tp,
        engine.tp,
        f"start with --tensor-parallel-size {policy.tp}, or convert again with --tp {engine.tp}",
    )
    problems.differs(
        "pipeline parallel size",
        policy.pp,
        engine.pp,
        f"start with --pipeline-parallel-size {policy.pp}, or convert again with --pp {engine.pp}",
    )
    if manifest.model.experts:
        on = {True: "on", False: "off"}
        remedy = "start with" if policy.ep else "start without"
        problems.differs(
            "expert parallelism",
            on[policy.ep],
            on[engine.ep],
            f"{remedy} --enable-expert-parallel, or convert again",
        )
        if engine.ep and engine.dp > 1:
            problems.add(
                f"expert parallelism over {engine.dp} data-parallel ranks spreads experts over more "
                f"ranks than the {policy.tp} converted for: start with --data-parallel-size 1"
            )
    problems.model_class(engine.class_names)
    problems.quantization(engine.quantization, allowed=("gguf",))
    if engine.quantization == "gguf" and not manifest.packed:
        problems.add(
            f"holds no packed weights (--weights {policy.weights}), but quantization gguf is asked for: "
            "leave out --quantization"
        )
    problems.refuse()


def _built(name: str) -> str:
    """The name under which a layer is built: that of its tensors without the draft's own levels."""
    return name.replace(".mtp_block.", ".").replace(".shared_head.", ".")


class Packing:
    """Which of a rank's layers are packed, by the name vLLM gives a layer when it builds it."""

    SUFFIX = ".qweight"
    EMBEDDING = "model.embed_tokens"
    TIED: ClassVar[dict[str, str]] = {EMBEDDING: "lm_head"}
    """A tied model's matrix is in the file once, under the head's name."""

    def __init__(self, entry: ShardEntry) -> None:
        self._names = {_built(name) for t in entry.tensors for name in (t.name, *t.aliases)}
        self.packed = {n.removesuffix(self.SUFFIX) for n in self._names if n.endswith(self.SUFFIX)}
        self.plain = {n.removesuffix(".weight") for n in self._names if n.endswith(".weight")} - self.packed

    def is_packed(self, layer: str) -> bool:
        """Whether the linear or head layer of that name is packed."""
        return _built(layer) in self.packed

    def embedding_packed(self, layer: str) -> bool:
        """Whether the embedding of that name is; some classes build theirs without a name."""
        layer = layer or self.EMBEDDING
        if layer not in self.packed and layer not in self.plain:
            layer = self.TIED.get(layer, layer)
        return layer in self.packed

    def experts_packed(self, layer: str) -> bool:
        """Whether the routed experts of that name are packed."""
        found = {
            kind
            for weights in ("w13", "w2")
            for name in (_built(f"{layer}.{weights}"), _built(f"{layer}.routed_experts.{weights}"))
            for kind in ("_qweight", "_weight")
            if name + kind in self._names
        }
        if len(found) > 1:
            text = (
                f"{layer}: some of its expert matrices are packed and some are not, which no kernel takes: "
                "convert again with --weights bf16, or for a tensor parallel size that cuts no block"
            )
            raise ShardsError(text)
        return found == {"_qweight"}


def row_ranges(entry: TensorEntry) -> list[tuple[int, int, int]]:
    """First row, end and bytes of a row of each member of a packed tensor."""
    return [
        (m.rows[0], m.rows[1], m.row_bytes if m.row_bytes is not None else entry.shape[-1])
        for m in entry.members
    ]
