"""Passes: graph to graph, one idea per file. `pipeline.py` says which run when, and why there."""

from __future__ import annotations

if __name__ != "fxshard.passes":
    raise ImportError(f"import fxshard.passes, not {__name__}: a second copy would break every isinstance check")
