"""Grapheme-to-phoneme conversion on CMUdict: an attention decoder that loops over packed words and a TensorArray."""
