"""Functions are alike where they are made of the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from fxshard.ir.closures import facts_of


def adding(number: Any) -> Callable[[int], Any]:
    return lambda x: x + number


def itself() -> Callable[[int], Any]:
    def count(x: int) -> Any:
        return count(x - 1) if x else 0

    return count


class Owner:
    def method(self) -> int:
        return 1


def test_functions_of_one_definition_are_alike_if_what_they_close_over_is() -> None:
    assert facts_of(adding(1)) == facts_of(adding(1)) != facts_of(adding(2))
    assert facts_of(adding(1)) != facts_of(adding(1.0))  # what adds a float gives floats
    assert facts_of(adding({torch.ops.aten.mm.default})) == facts_of(adding({torch.ops.aten.mm.default}))
    assert facts_of(adding([1, {"a": 2}])) != facts_of(adding([1, {"a": 3}]))


def test_functions_of_two_definitions_differ() -> None:
    assert facts_of(lambda x: x) != facts_of(lambda x: x)


def test_a_function_may_close_over_itself() -> None:
    assert facts_of(itself()) == facts_of(itself())


def test_partials_are_alike_if_their_parts_are() -> None:
    assert facts_of(partial(adding(1), 2)) == facts_of(partial(adding(1), 2)) != facts_of(partial(adding(1), 3))


def test_methods_are_alike_if_they_are_of_one_object() -> None:
    one = Owner()
    assert facts_of(one.method) == facts_of(one.method) != facts_of(Owner().method)
