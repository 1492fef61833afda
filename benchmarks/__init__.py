"""What the project is measured on, and the programs that measure: docs/benchmarks/README.md."""
