"""A compiled backward that asks, when it runs, what becomes of its gradients: [Note: variants] in `ir/variant.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fxshard.errors import InvariantError
from fxshard.ir.variant import PLAIN, Variant
from fxshard.runtime import accumulation
from fxshard.runtime.frame import Frame

Code = Callable[[list[Any]], Any]
"""A compiled graph that takes its inputs in one list, which it empties."""


class Backward:
    """The variants of one captured graph's backward; all but the plain one are compiled when first needed."""

    def __init__(self, plain: Code, frame: Frame, compile_variant: Callable[[Variant], Code]) -> None:
        """`compile_variant` gives code that takes the inputs of `plain`, and after them its accumulators."""
        self._code, self._frame, self._compile = {PLAIN: plain}, frame, compile_variant
        self._boxed_call = True  # AOTAutograd asks for it, and looks for it in the instance

    def __call__(self, inputs: list[Any]) -> Any:
        """Run the variant that the units of this call want."""
        call, self._frame.running = self._frame.running, None
        if call is None:
            raise InvariantError("the backward of a captured graph runs, and no forward has announced it.")
        units, trained = call.units, self._frame.trained
        which = accumulation.variant_for(units, trained)
        if which not in self._code:
            self._code[which] = self._compile(which)
        inputs.extend(accumulation.sums_for(which, units, trained))
        results = self._code[which](inputs)
        accumulation.note_run(which, units, trained)
        return results
