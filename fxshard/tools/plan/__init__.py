"""The models that `fxshard plan` knows by name."""
