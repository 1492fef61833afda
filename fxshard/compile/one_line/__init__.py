"""Models that torch.compile shards itself: `first_call.shard_root` is the entry."""
