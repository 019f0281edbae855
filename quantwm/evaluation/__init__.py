"""How good a world is beside its truth: the acceptance table and what carries over."""
