"""State as a tree: take the tensors out of dicts, lists and tuples, and put others in their places."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

KeyPath = tuple[Any, ...]
"""Where a value stands in a tree: keys of dicts, indices of lists."""


class LeafMark(NamedTuple):
    """Stands where a tensor was, at this path."""

    path: KeyPath


def name_of(path: KeyPath) -> str:
    """Return a path in words."""
    return ".".join(map(str, path))


def take_out(tree: Any) -> tuple[Any, dict[KeyPath, Tensor]]:
    """Return `tree` with a `LeafMark` for each tensor, and the tensors; everything else is copied."""

    def take(path: KeyPath, value: Any) -> Any:
        if isinstance(value, Tensor):
            return LeafMark(path)
        return value if isinstance(value, _ATOMS) else copy.deepcopy(value)

    return mapped(take, tree), tensors_in(tree)


def put_back(skeleton: Any, tensors: Mapping[KeyPath, Any]) -> Any:
    """Return the tree again, with `tensors` in the places."""
    return mapped(lambda _, value: tensors[value.path] if type(value) is LeafMark else value, skeleton)


def tensors_in(tree: Any) -> dict[KeyPath, Tensor]:
    """Return the tensors of `tree` by the keys that lead to them."""
    return {path: value for path, value in leaves_in(tree).items() if isinstance(value, Tensor)}


def leaves_in(tree: Any) -> dict[KeyPath, Any]:
    """Return all values of `tree` that are no dicts, lists or tuples, by the keys that lead to them."""
    found: dict[KeyPath, Any] = {}
    mapped(lambda path, value: found.setdefault(path, value), tree)
    return found


_ATOMS = (int, float, str, bool, type(None))
_ENDS = (Tensor, LeafMark, *_ATOMS)


def mapped(function: Callable[[KeyPath, Any], Any], tree: Any, path: KeyPath = ()) -> Any:
    """Return `tree` with what `function` makes of the path and value of each leaf."""
    if type(tree) is dict:
        return {
            key: function((*path, key), value) if isinstance(value, _ENDS) else mapped(function, value, (*path, key))
            for key, value in tree.items()
        }
    if isinstance(tree, _ENDS):
        return function(path, tree)
    if isinstance(tree, dict):
        other = copy.copy(tree)  # what else a dict of another class holds (a default, an order) stays
        other.update(mapped(function, dict(tree), path))
        return other
    if isinstance(tree, list | tuple):
        values = [mapped(function, value, (*path, i)) for i, value in enumerate(tree)]
        if hasattr(tree, "_fields"):
            return type(tree)(*values)
        return values if type(tree) is list else type(tree)(values)
    return function(path, tree)
