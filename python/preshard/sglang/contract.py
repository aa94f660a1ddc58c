"""What the plugin refuses whatever the SGLang version, and why.

A version's file gives ``register()``, which makes the load format known to SGLang, and a loader whose steps are: read
the manifest, :func:`check` it against what the engine runs, build the model with :func:`preshard.bind.released`,
compare the :func:`forms` that both hold, :func:`preshard.plugin.fill` the model from this rank's file, and let the model
and its layers derive what they derive from weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import ShardsError
from ..manifest import Manifest, ShardEntry
from ..plugin import Problems


@dataclass(frozen=True)
class Engine:
    """What the engine runs, as far as it decides which file fits."""

    tp: int
    pp: int
    ep: int
    """Ranks over which experts are placed whole; 1: each expert is cut."""
    attention_dp: int
    """Ranks that each hold attention whole."""
    class_names: tuple[str, ...]
    """``architectures`` of the model's config; empty for a draft."""
    quantization: str | None
    """Quantisation that the user or config.json asked for."""


def check(directory: str, manifest: Manifest, engine: Engine) -> None:
    """Refuses a directory that was not converted for this engine; all reasons at once."""
    policy, problems = manifest.policy, Problems(directory, manifest)
    problems.layout("sglang")
    problems.differs(
        "tensor parallel size",
        policy.tp,
        engine.tp,
        f"start with --tp-size {policy.tp}, or convert again with --tp {engine.tp}",
    )
    problems.differs("pipeline parallel size", policy.pp, engine.pp, f"start with --pp-size {policy.pp}")
    if manifest.model.experts:
        ep = policy.tp if policy.ep else 1
        again = "with --ep" if engine.ep > 1 else "without --ep"
        problems.differs(
            "expert parallel size", ep, engine.ep, f"start with --ep-size {ep}, or convert again {again}"
        )
    if engine.attention_dp > 1:
        problems.add(
            f"data-parallel attention over {engine.attention_dp} ranks holds attention whole on each, "
            "which is not converted for: start without --enable-dp-attention"
        )
    problems.model_class(engine.class_names)
    problems.quantization(engine.quantization)
    if manifest.packed:
        problems.add(
            "holds packed weights, where the layers of the engine expect bf16: convert again with --weights bf16"
        )
    problems.refuse()


@dataclass(frozen=True)
class _Form:
    """Two ways in which the engine may hold the same weights, by parts of parameters' names."""

    what: str
    fused: str
    """In names where they are one, unless ``separate`` is in some."""
    separate: str
    start_fused: str
    start_separate: str
    convert_fused: str
    convert_separate: str

    def of(self, names: Iterable[str]) -> str | None:
        """``fused`` or ``separate``; ``None`` for a model that has neither."""
        names = list(names)
        if any(self.separate in name for name in names):
            return "separate"
        if any(self.fused in name for name in names):
            return "fused"
        return None


_FORMS = (
    _Form(
        what="shared experts",
        fused=".mlp.experts.",
        separate=".mlp.shared_experts.",
        start_fused="start with --enforce-shared-experts-fusion",
        start_separate="start with --disable-shared-experts-fusion",
        convert_fused="--shared-experts fused",
        convert_separate="--shared-experts separate",
    ),
    _Form(
        what="the indexer's wk and weights_proj",
        fused=".indexer.wk_weights_proj.",
        separate=".indexer.wk.",
        start_fused="start without SGLANG_DISABLE_DSA_INDEXER_FUSION",
        start_separate="start with SGLANG_DISABLE_DSA_INDEXER_FUSION=1",
        convert_fused="--layout sglang",
        convert_separate="--layout sglang-dsa-separate",
    ),
)


def forms(directory: str, entry: ShardEntry, names: Iterable[str]) -> None:
    """Refuses a file that holds the weights in another form than the model with these parameters."""
    names = list(names)
    problems = []
    for form in _FORMS:
        converted, held = form.of(t.name for t in entry.tensors), form.of(names)
        if converted is None or held is None or converted == held:
            continue
        start, again = (
            (form.start_fused, form.convert_separate)
            if converted == "fused"
            else (form.start_separate, form.convert_fused)
        )
        problems.append(
            f"{directory}: converted with {form.what} {converted}, the engine holds them {held}: {start}, "
            f"or convert again with {again}"
        )
    if problems:
        raise ShardsError("\n".join(problems), problems)
