"""The parts of `python -m benchmarks.gpu_bench`: sharded training on one GPU with an emulated link."""
