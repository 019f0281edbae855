"""Makes the embedded world: maps, frames, autoencoder, transformer, evaluation, export."""
