"""Grapheme-to-phoneme conversion on CMUdict: an attention decoder whose loops run over TensorArrays."""
