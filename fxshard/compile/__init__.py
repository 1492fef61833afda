"""From Dynamo's graph to code that runs: capture, stages, Inductor, caches."""
