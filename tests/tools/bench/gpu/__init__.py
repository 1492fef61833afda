"""The parts of `python -m tests.tools.bench.gpu_bench`: sharded training on one GPU with an emulated link."""
