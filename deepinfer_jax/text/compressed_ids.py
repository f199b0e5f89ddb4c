"""Compressed token ids: the map that lets the Engram's n-grams ignore case, accents and spacing."""

import numpy as np
from tokenizers import Regex, normalizers

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import CheckpointError
from deepinfer_jax.text.tokenizer import Tokenizer

# A private-use character that stands for "exactly one space" while surrounding spaces are stripped.
_ONE_SPACE = "\ue000"


def compressed_token_map(tokenizer: Tokenizer) -> np.ndarray:
    """Compressed id of every token id: int32 [network_vocab_size].

    Each id is decoded alone. Its key is the token's string when the bytes are not whole
    characters, else the text after compatibility decomposition, removal of accents, lower-casing
    and collapsing of spaces (the text itself if nothing is left). Ids with equal keys share a
    compressed id; those are numbered by first appearance. Padding rows share one of their own.
    Source: the published Engram's tokenizer compression.
    """
    normalizer = token_normalizer()
    numbers: dict[str | None, int] = {}
    out = np.empty(tokenizer.network_vocab_size, np.int32)
    for token_id in range(tokenizer.network_vocab_size):
        out[token_id] = numbers.setdefault(_key(tokenizer, normalizer, token_id), len(numbers))
    return out


def check_compressed_map(token_map: np.ndarray, config: ModelConfig) -> None:
    """Refuse a map whose number of compressed ids is not the config's (CheckpointError).

    The n-gram hash is drawn for that number, so the Engram's rows belong to this map only.
    """
    count = int(token_map.max()) + 1
    if count != config.engram_compressed_vocab_size:
        raise CheckpointError(
            f"The tokenizer gives {count} compressed ids, but engram_compressed_vocab_size is "
            f"{config.engram_compressed_vocab_size}.",
            "The Engram's table rows were trained for the other tokenizer's map.",
            "Use the tokenizer.json and config.json of the same checkpoint.",
        )


def token_normalizer() -> normalizers.Normalizer:
    """The text normalisation of one token, from the `tokenizers` library's primitives."""
    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _ONE_SPACE),
            normalizers.Strip(),
            normalizers.Replace(_ONE_SPACE, " "),
        ]
    )


def _key(tokenizer: Tokenizer, normalizer: normalizers.Normalizer, token_id: int) -> str | None:
    if token_id >= tokenizer.vocab_size:
        return None
    text = tokenizer.decode([token_id])
    if "\ufffd" in text:
        return tokenizer.token_string(token_id)
    return normalizer.normalize_str(text) or text
