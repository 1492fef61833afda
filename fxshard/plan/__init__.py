"""What a training run will cost, before anybody rents the GPUs for it."""
