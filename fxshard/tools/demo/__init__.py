"""Watch a real model train sharded: what `fxshard demo` runs."""
