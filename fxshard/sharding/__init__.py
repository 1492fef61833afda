"""From parameters of modules to units: `fully_shard`, and what becomes of the modules."""
