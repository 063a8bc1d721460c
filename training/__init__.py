"""Training: typed recipes, frozen batches, Muon + AdamW, atomic checkpoints."""
