"""Model adapters: one file for each wire a model may speak."""
