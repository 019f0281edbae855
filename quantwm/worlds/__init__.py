"""World models: one adapter per family behind one protocol."""
