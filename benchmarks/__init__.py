"""What the numbers in `docs/results/` come from. Run as `python -m benchmarks.NAME`."""
