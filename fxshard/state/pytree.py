"""State as a tree: take the tensors out of dicts, lists and tuples, and put others in their places."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

KeyPath = tuple[Any, ...]
"""Where a value stands in a tree: keys of dicts, indices of lists."""


class LeafMark(NamedTuple):
    """Stands where the tensor of this number was."""

    number: int


class Leaf(NamedTuple):
    """A tensor and the keys that lead to it."""

    path: KeyPath
    tensor: Tensor

    @property
    def name(self) -> str:
        """The keys in words."""
        return ".".join(map(str, self.path))


def take_out(tree: Any) -> tuple[Any, list[Leaf]]:
    """Return `tree` with a `LeafMark` for each tensor, and the tensors; everything else is copied."""
    leaves: list[Leaf] = []

    def take(path: KeyPath, value: Any) -> Any:
        if isinstance(value, Tensor):
            leaves.append(Leaf(path, value))
            return LeafMark(len(leaves) - 1)
        return value if isinstance(value, _ATOMS) else copy.deepcopy(value)

    return _mapped(take, tree, ()), leaves


def put_back(skeleton: Any, tensors: Sequence[Any]) -> Any:
    """Return the tree again, with `tensors` in the places."""
    return _mapped(lambda _, value: tensors[value.number] if type(value) is LeafMark else value, skeleton, ())


_ATOMS = (int, float, str, bool, type(None))
_ENDS = (Tensor, LeafMark, *_ATOMS)


def _mapped(function: Callable[[KeyPath, Any], Any], tree: Any, path: KeyPath) -> Any:
    if type(tree) is dict:
        return {
            key: function((*path, key), value) if isinstance(value, _ENDS) else _mapped(function, value, (*path, key))
            for key, value in tree.items()
        }
    if isinstance(tree, _ENDS):
        return function(path, tree)
    if isinstance(tree, dict):
        return _refilled(tree, _mapped(function, dict(tree), path))
    if isinstance(tree, list | tuple):
        values = [_mapped(function, value, (*path, i)) for i, value in enumerate(tree)]
        if hasattr(tree, "_fields"):
            return type(tree)(*values)
        return values if type(tree) is list else type(tree)(values)
    return function(path, tree)


def _refilled(tree: dict[Any, Any], values: Mapping[Any, Any]) -> Any:
    """Return a dict of another class with other values: what else it holds (a default, an order) stays."""
    other = copy.copy(tree)
    other.update(values)
    return other
