"""`python -m fxshard` is the command `fxshard`, as torchrun starts it: `torchrun -m fxshard bench ...`."""

from __future__ import annotations

import sys

from fxshard.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
