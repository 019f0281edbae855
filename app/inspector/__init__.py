"""The inspector: watch, step, wipe, slice and measure lanes from raw frames."""
