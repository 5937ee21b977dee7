"""Pre-training of masked diffusion language models (arXiv 2406.07524), from a laptop CPU to a cluster."""

__version__ = "0.1.0"
