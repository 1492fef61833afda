"""The parts of `python -m tests.bench.gpu_bench`: sharded training on one GPU with an emulated link."""
