"""Turn texts into tokens: tokenizers, vocabularies, and rows of different lengths."""
