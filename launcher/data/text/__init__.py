"""Text: corpora and pairs of sentences as rows of tokens."""
