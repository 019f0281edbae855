"""See, measure and shrink the KV cache of video world models."""

__version__ = "0.1.0"
