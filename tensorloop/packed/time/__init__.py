"""What mixes the steps of a row: convolutions, pooling, norms of channels, other rates, spectra. Rows never mix."""
