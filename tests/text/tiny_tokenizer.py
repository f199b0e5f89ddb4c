"""How the shipped tiny tokenizer is made: one token per byte, the release's special spellings.

Ids: BOS, EOS, PAD at 0..2, byte b at 3 + b, then the other special tokens in the release's order.
"""

import json
from typing import Any

from deepinfer_jax.text import spellings

GROUNDING = [
    f"<｜{bar}{name}｜>" for name in ("polygon", "point", "box", "ref") for bar in ("/", "")
]

_SPLITS = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    "|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*"
    r"|\s*"
    "[\r\n]+"
    r"|\s+(?!\S)|\s+",
)


def byte_characters() -> list[str]:
    """The character that byte-level BPE writes for each byte value."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]


def build() -> dict[str, Any]:
    """The tokenizer as the object that `tokenizer.json` holds."""
    framing = [spellings.BOS, spellings.EOS, spellings.PAD]
    further = [s for s in spellings.RENDERED if s not in framing] + GROUNDING
    tokens = [*framing, *byte_characters()]
    vocab = {token: i for i, token in enumerate(tokens)}
    added = [(vocab[s], s) for s in framing]
    added += [(len(tokens) + i, s) for i, s in enumerate(further)]
    byte_level = {"type": "ByteLevel", "trim_offsets": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": i,
                "content": spelling,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for i, spelling in added
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                *(
                    {
                        "type": "Split",
                        "pattern": {"Regex": pattern},
                        "behavior": "Isolated",
                        "invert": False,
                    }
                    for pattern in _SPLITS
                ),
                byte_level | {"add_prefix_space": False, "use_regex": False},
            ],
        },
        "post_processor": None,
        "decoder": byte_level | {"add_prefix_space": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": vocab,
            "merges": [],
        },
    }


def dumps(spec: dict[str, Any]) -> bytes:
    """The file's bytes."""
    return json.dumps(spec, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
