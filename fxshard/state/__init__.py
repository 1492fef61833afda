"""Full and sharded state of models and optimizers."""
