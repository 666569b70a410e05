"""Grapheme-to-phoneme conversion on CMUdict: an attention decoder, a plain loop over TensorArrays."""
