"""Grapheme-to-phoneme conversion on CMUdict: an attention decoder written as a plain loop over TensorArrays."""
