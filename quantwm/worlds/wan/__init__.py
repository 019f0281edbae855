"""The Wan family: one causal backbone for four published world models."""
