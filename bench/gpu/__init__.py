"""Parts of `python -m bench.gpu_check`."""
