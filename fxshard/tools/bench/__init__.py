"""Compare ways to train one model on several ranks: what `fxshard bench` runs."""
