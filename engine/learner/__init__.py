"""From episodes to new weights: advantages, batches, packing, losses, the optimizer step. Plain torch."""
