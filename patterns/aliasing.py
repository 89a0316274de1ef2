"""What shares memory with what, and who would notice."""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch import fx
from torch._ops import OpOverload

from fusepass.patterns.memo import remembered

aten = torch.ops.aten

BATCH_NORMS = frozenset({
    aten.native_batch_norm.default, aten.cudnn_batch_norm.default, aten._native_batch_norm_legit.default,
})  # fmt: skip
"""Operators that update running statistics in training, of which not every schema tells."""


def updates_statistics(node: fx.Node) -> bool:
    """Whether `node` is one of `BATCH_NORMS` and does."""
    return node.target in BATCH_NORMS and bool(node.args[5]) and node.args[3] is not None


@remembered
def is_view(target: object) -> bool:
    """Whether `target` gives its first argument's memory under another shape."""
    if not isinstance(target, OpOverload):
        return False
    returned = (result.alias_info for result in target._schema.returns)
    return target is aten._unsafe_view.default or any(info is not None and not info.is_write for info in returned)


def viewed(node: fx.Node) -> fx.Node | None:
    """The tensor, or the tuple of them, that `node` is a view of; None where it is none, or one of a number (``_conj(1j)``)."""
    if node.target is operator.getitem:
        producer = node.all_input_nodes[0]
        return producer if is_view(producer.target) else None
    return next(iter(node.all_input_nodes), None) if is_view(node.target) else None


def base(node: fx.Node) -> fx.Node:
    """The node that made the memory of `node`; `node` itself where it is no view."""
    while (source := viewed(node)) is not None:
        node = source
    return node


def call_of(node: fx.Node) -> fx.Node:
    """What computes `node`: where that is one of several results, the call that gives all of them."""
    return node.all_input_nodes[0] if node.target is operator.getitem else node


def readers(node: fx.Node, *, beside: fx.Node | None = None) -> Iterator[fx.Node]:
    """The nodes that read `node`, a view of it or a tensor of the tuple it is, and these; but not through `beside`."""
    for user in node.users:
        if user is beside:
            continue
        yield user
        if viewed(user) is node or user.target is operator.getitem:
            yield from readers(user, beside=beside)


def escapes(node: fx.Node, *, beside: fx.Node | None = None) -> bool:
    """Whether the graph returns `node` or a view of it, otherwise than through `beside`."""
    return any(reader.op == "output" for reader in readers(node, beside=beside))


def written(node: fx.Node) -> Iterator[fx.Node]:
    """The arguments that `node` writes to."""
    if not isinstance(node.target, OpOverload) or not node.target._schema.is_mutable:
        return
    for argument, value in zip(node.target._schema.arguments, node.args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, fx.Node):
            yield value


def change_seen(old: fx.Node, new: fx.Node) -> str | None:
    """How the caller or a later operator could tell that `new` took the place of the equal `old`; None if not at all.

    Two tensors that can both be seen must not come to share memory or become one object, and a value must not be
    read from memory that is written meanwhile.
    """
    memory = base(new)
    if memory is new and not new.users:
        return None  # made for the purpose, with memory of its own
    if memory is base(old):
        same_object = _returned(old) and (_is_given(new) or _returned(new))
        return f"{old.name} would be {new.name} itself" if same_object else None
    if any(base(target) is memory for reader in readers(memory) for target in written(reader)):
        return f"{memory.name} is written"
    if escapes(old) and (_is_given(memory) or escapes(memory, beside=old)):
        return f"{old.name} is returned and would share memory with {memory.name}"
    return None


def _is_given(node: fx.Node) -> bool:
    return node.op in ("placeholder", "get_attr")


def _returned(node: fx.Node) -> bool:
    return any(user.op == "output" for user in node.users)
