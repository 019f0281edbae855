"""Speed and memory of the cache, measured: `python -m benchmarks NAME`."""
