"""Putting a shard's tensors into a model without a copy.

The model is built as its engine builds it, but its large parameters give their memory back
(:func:`released`): they keep class, shape, dtype, device and attributes.
Binding then points each of them at its place in the shard, so that all names and modules that share
a parameter follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from .errors import ShardsError
from .manifest import ShardEntry, TensorEntry
from .shard import Shard

_SMALL = 1 << 20
"""Smaller parameters keep their memory until they are bound: code that builds a layer may touch them."""

_LISTED = 8
"""More names than this are counted, not listed."""

_DTYPES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.bool: "BOOL",
}


@dataclass
class Slot:
    """One piece of the model's memory: every name, tensor object and module that reaches it."""

    names: list[str] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    owners: list[tuple[nn.Module, str]] = field(default_factory=list)

    @property
    def first(self) -> torch.Tensor:
        """The tensor that covers the slot."""
        return max(self.tensors, key=lambda t: 0 if isinstance(t, UninitializedParameter) else t.numel())


@contextmanager
def released() -> Iterator[None]:
    """The large parameters of modules built inside have no memory when it ends.

    On a GPU each gives its memory back as it is registered, so that they never need it together.
    Two kinds keep theirs until the end: those in host memory, which costs nothing before it is
    written to, and those of classes that initialise themselves (``reset_parameters``).
    """
    register = nn.Module.register_parameter
    later: list[nn.Parameter] = []

    def wrapped(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        if param is None or isinstance(param, UninitializedParameter) or param.is_meta:
            return
        if param.untyped_storage().nbytes() < _SMALL:
            return
        if param.device.type == "cpu" or hasattr(module, "reset_parameters"):
            later.append(param)
        else:
            param.untyped_storage().resize_(0)

    setattr(nn.Module, "register_parameter", wrapped)  # noqa: B010 (a method is not assignable to mypy)
    try:
        yield
    finally:
        setattr(nn.Module, "register_parameter", register)  # noqa: B010
    for param in later:
        if param.untyped_storage().resizable():
            param.untyped_storage().resize_(0)


def _identity(tensor: torch.Tensor) -> tuple[str, int]:
    if isinstance(tensor, UninitializedParameter):
        return ("object", id(tensor))
    return ("storage", tensor.untyped_storage()._cdata)


def slots(model: nn.Module) -> list[Slot]:
    """What has to be filled: parameters and persistent buffers, one slot per piece of memory."""
    found: dict[tuple[str, int], Slot] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for kind in (module._parameters, module._buffers):
            for attribute, tensor in kind.items():
                if tensor is None:
                    continue
                slot = found.setdefault(_identity(tensor), Slot())
                if not any(t is tensor for t in slot.tensors):
                    slot.tensors.append(tensor)
                if not any(m is module and a == attribute for m, a in slot.owners):
                    slot.owners.append((module, attribute))
                if attribute not in module._non_persistent_buffers_set:
                    slot.names.append(f"{prefix}.{attribute}" if prefix else attribute)
    # Views that a module keeps as plain attributes follow too.
    for module in model.modules():
        for tensor in vars(module).values():
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, UninitializedParameter):
                slot = found.get(_identity(tensor), Slot())
                if not any(t is tensor for t in slot.tensors):
                    slot.tensors.append(tensor)
    return [slot for slot in found.values() if slot.names]


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(sorted(names)[:_LISTED]) + more


def match(model: nn.Module, entry: ShardEntry) -> list[tuple[Slot, TensorEntry]]:
    """Pairs each slot with the file's tensor, by its name or an alias.

    Raises :class:`preshard.ShardsError` with everything that does not fit: parameters without a
    tensor, tensors without a parameter, other dtypes or shapes.
    """
    by_name = {name: t for t in entry.tensors for name in t.aliases}
    by_name.update((t.name, t) for t in entry.tensors)
    pairs: list[tuple[Slot, TensorEntry]] = []
    missing, wrong = [], []
    used: set[str] = set()
    for slot in slots(model):
        hits = {t.name: t for t in (by_name.get(n) for n in slot.names) if t is not None}
        if not hits:
            missing.append(min(slot.names))
            continue
        if len(hits) > 1:
            wrong.append(
                f"{entry.file}: {', '.join(sorted(hits))}: one parameter of the model, expected one tensor"
            )
        for name, tensor in hits.items():
            if name in used:
                wrong.append(
                    f"{entry.file}: {name}: two parameters of the model, {min(slot.names)} one of them"
                )
            used.add(name)
            pairs.append((slot, tensor))
            want = slot.first
            if isinstance(want, UninitializedParameter):
                continue
            dtype, shape = _DTYPES.get(want.dtype, str(want.dtype)), tuple(want.shape)
            if (tensor.dtype, tensor.shape) != (dtype, shape):
                wrong.append(
                    f"{entry.file}: {name}: {tensor.dtype} {list(tensor.shape)}, the model has {dtype} {list(shape)}"
                )
    problems = wrong
    if missing:
        problems.append(
            f"{entry.file}: no tensor for {len(missing)} parameters of the model: {_listed(missing)}"
        )
    extra = [t.name for t in entry.tensors if t.name not in used]
    if extra:
        problems.append(
            f"{entry.file}: {len(extra)} tensors that the model has no parameter for: {_listed(extra)}"
        )
    if problems:
        problems.append(
            f"{entry.file}: does not fit the model that the engine built: "
            "convert again for this engine, its class and its options"
        )
        raise ShardsError("\n".join(problems), problems)
    return pairs


Install = Callable[[Slot, TensorEntry, torch.Tensor], None]


def bind(pairs: list[tuple[Slot, TensorEntry]], shard: Shard, install: Install) -> None:
    """Points every slot at its tensor; those that have no memory yet go through ``install``."""
    for slot, entry in pairs:
        view = shard[entry.name]
        if isinstance(slot.first, UninitializedParameter):
            install(slot, entry, view)
            continue
        first = slot.first
        start = first.storage_offset()
        if first.device != view.device:
            raise ShardsError(
                f"{entry.name}: the model keeps it on {first.device}, the shard is on {view.device}"
            )
        for tensor in slot.tensors:
            if tensor is first or (tensor.shape, tensor.stride()) == (first.shape, first.stride()):
                tensor.data = view
            else:  # a view into the parameter's memory stays one
                offset = tensor.storage_offset() - start
                tensor.data = view.view(-1).as_strided(
                    tensor.shape, tensor.stride(), view.storage_offset() + offset
                )
