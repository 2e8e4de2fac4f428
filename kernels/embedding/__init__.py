"""The look-up of tokens in the embedding table; torch's `index_select` is the same."""
