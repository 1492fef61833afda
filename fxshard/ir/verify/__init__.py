"""The verifier: what must hold of a graph after every pass."""
