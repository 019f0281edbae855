"""The cache backend: formats, spans, policies, bytes, attention."""
