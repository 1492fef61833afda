"""What a graph costs: FLOPs, bytes, seconds, as expressions in its own symbols and the world size."""
