"""CLIP's vocabulary: its size, and its tokenizer as the `transformers` library has it, built from open_clip's."""

import functools

CLIP = "clip"
"""Name of CLIP's tokenizer in options; its vocabulary is part of open_clip."""
CLIP_TOKENS = 77
"""Context length of CLIP's text tower, start and end tokens included."""
CLIP_VOCABULARY = 49408
"""Number of tokens of CLIP's tokenizer."""
START = "<|startoftext|>"
END = "<|endoftext|>"
_OPEN_CLIP = {"<start_of_text>": START, "<end_of_text>": END}


@functools.cache
def clip_tokenizer_json() -> str:
    """Return the tokenizer as JSON text of the `tokenizers` library.

    It has open_clip's token ids, but does not repair damaged Unicode (ftfy) and HTML entities as open_clip does.
    """
    from open_clip import SimpleTokenizer
    from transformers import CLIPTokenizer

    tokenizer = SimpleTokenizer()
    vocabulary = {_OPEN_CLIP.get(token, token): number for token, number in tokenizer.encoder.items()}
    return str(CLIPTokenizer(vocab=vocabulary, merges=list(tokenizer.bpe_ranks)).backend_tokenizer.to_str())
