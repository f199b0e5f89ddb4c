"""Prompts that travel as text through a harness, special tokens and all.

A harness hands every prompt on as one text, a rendered chat too, and to this model a spelling in
a text is never a special token. So each special token of a rendered chat gets a mark in front, a
code point that Unicode keeps for a program's own use, and only a marked spelling becomes one.
"""

import re
from collections.abc import Sequence

from deepinfer_jax.errors import RequestError
from deepinfer_jax.text import spellings
from deepinfer_jax.text.tokenizer import Piece, Tokenizer

MARK = "\ufdd0"
_START = MARK + spellings.BOS


def marked(pieces: Sequence[Piece]) -> str:
    """A rendered chat as a text that `encode` turns into the same tokens.

    Raises RequestError when a message holds the mark, which could forge a special token.
    """
    if any(MARK in piece.text for piece in pieces):
        raise RequestError(
            "A message holds the code point U+FDD0.",
            "It marks special tokens between the harness and the model, and is no character.",
            "Remove it from the data.",
        )
    return "".join(MARK + text if special else text for text, special in pieces)


def is_chat(text: str) -> bool:
    """Whether a text is a chat that `marked` wrote, or begins with one."""
    return text.startswith(_START)


def encode(tokenizer: Tokenizer, text: str, *, bos: bool = True) -> list[int]:
    """Token ids of a text, or of a chat that `marked` wrote, whatever was put behind it.

    Args:
        tokenizer: the model's.
        text: a chat brings its own BOS.
        bos: put BOS before a plain text, once.

    Raises:
        RequestError: marks in a text that is no chat.
    """
    if not is_chat(text):
        if MARK in text:
            raise RequestError(
                "A text holds the code point U+FDD0 and is no chat that this model rendered.",
                "A special token could be forged with it.",
                "Remove it from the data, or leave few-shot text out of rendered chats.",
            )
        return tokenizer.encode(text, add_bos=bos)
    names = "|".join(map(re.escape, sorted(tokenizer.special_ids, key=len, reverse=True)))
    pieces = []
    for part in re.split(f"({MARK}(?:{names}))", text):
        special = part.startswith(MARK)
        pieces.append(Piece(part.removeprefix(MARK), special))
    return tokenizer.encode_pieces(pieces)
