"""The file `tokenizer.json`: parsing, and every check that split encoding relies on."""

import json
from collections.abc import Mapping
from typing import Any

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import CheckpointError
from deepinfer_jax.text import spellings


def _refuse_field(source: str, field: str, found: object, wanted: str) -> CheckpointError:
    return CheckpointError(
        f"The tokenizer {source} sets {field} to {found!r}; {wanted} is supported.",
        "Text spans are encoded one by one between special tokens, which gives the model's ids "
        "only for a byte-level BPE without context across those borders.",
        "Use the tokenizer.json of a V4.1 checkpoint.",
    )


def parse(data: bytes, source: str) -> dict[str, Any]:
    """The file's JSON object. Raises CheckpointError, naming `source`, for a damaged file."""
    try:
        spec = json.loads(data)
        missing = {"added_tokens"} - set(spec) | {"vocab", "merges"} - set(spec["model"])
        if missing:
            raise KeyError(*missing)
    except (ValueError, KeyError, TypeError) as error:
        raise damaged(source, error) from None
    return spec


def damaged(source: str, error: Exception) -> CheckpointError:
    """The refusal of a file that is no tokenizer, because of `error`."""
    return CheckpointError(
        f"{source} is not a tokenizer file ({type(error).__name__}: {error}).",
        "It must be JSON with added_tokens and a BPE model with vocab and merges.",
        "Download the file again.",
    )


def check_fields(spec: dict[str, Any], source: str) -> None:
    """Refuse every setting under which span-wise encoding could differ from joint encoding."""
    model = spec["model"]
    wanted = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "byte_fallback": False,
        "ignore_merges": False,
    }
    for key, value in wanted.items():
        found = model.get(key, value)
        if found != value and not (found == "" and value is None):
            raise _refuse_field(source, f"model.{key}", found, f"only {value!r}")
    for key in ("truncation", "padding"):
        if spec.get(key) is not None:
            raise _refuse_field(source, key, spec[key], "only null")
    normalizer = spec.get("normalizer")
    if normalizer not in (None, {"type": "Sequence", "normalizers": []}):
        raise _refuse_field(source, "normalizer", normalizer, "only an empty one")
    post = spec.get("post_processor")
    if post is not None and post.get("type") != "ByteLevel":
        raise _refuse_field(source, "post_processor", post.get("type"), "only 'ByteLevel' or null")
    decoder = spec.get("decoder") or {}
    if decoder.get("type") != "ByteLevel":
        raise _refuse_field(source, "decoder", decoder.get("type"), "only 'ByteLevel'")
    pre = spec.get("pre_tokenizer") or {}
    steps = pre.get("pretokenizers", []) if pre.get("type") == "Sequence" else [pre]
    for step in steps:
        kind = step.get("type")
        if kind not in ("Split", "Digits", "ByteLevel"):
            raise _refuse_field(
                source, "pre_tokenizer", kind, "only 'Split', 'Digits' and 'ByteLevel'"
            )
        if step.get("add_prefix_space", False):
            raise _refuse_field(source, "pre_tokenizer.add_prefix_space", True, "only False")
    if not steps or steps[-1].get("type") != "ByteLevel":
        raise _refuse_field(
            source,
            "pre_tokenizer",
            steps[-1].get("type") if steps else None,
            "only one that ends in 'ByteLevel'",
        )
    for token in spec["added_tokens"]:
        for flag in ("lstrip", "rstrip", "single_word"):
            if token.get(flag):
                field = f"added_tokens[{token['content']!r}].{flag}"
                raise _refuse_field(source, field, True, "only False")


def token_strings(spec: dict[str, Any], source: str) -> list[str]:
    """Token string of every id; an added token's spelling beats the vocabulary's entry."""
    vocab: dict[str, int] = spec["model"]["vocab"]
    missing = [b for c, b in byte_alphabet().items() if c not in vocab]
    if missing:
        raise CheckpointError(
            f"The tokenizer {source} lacks {len(missing)} of the 256 byte tokens in model.vocab "
            f"(first: byte {min(missing)}).",
            "Text with such a byte would lose it without a trace.",
            "Use a byte-level BPE with all 256 bytes.",
        )
    by_id = {i: s for s, i in vocab.items()}
    by_id |= {t["id"]: t["content"] for t in spec["added_tokens"]}
    holes = [i for i in range(len(by_id)) if i not in by_id]
    if holes:
        raise CheckpointError(
            f"The tokenizer {source} has {len(by_id)} ids up to {max(by_id)}; id {holes[0]} is "
            "missing in model.vocab and added_tokens.",
            "Ids must be numbered without gaps so that each can be turned back into text.",
            "Download the file again.",
        )
    return [by_id[i] for i in range(len(by_id))]


def check_ids(added: Mapping[str, int], size: int, config: ModelConfig | None, source: str) -> None:
    """Refuse missing spellings, ids beyond the network's, and framing ids unlike the config's."""
    missing = [s for s in spellings.RENDERED if s not in added]
    if missing:
        raise CheckpointError(
            f"The tokenizer {source} lacks {len(missing)} special tokens in added_tokens: "
            f"{', '.join(missing)}.",
            "Prompts of the V4.1 format are written with them.",
            "Use the tokenizer.json of a V4.1 checkpoint.",
        )
    if config is None:
        return
    if size > config.vocab_size:
        raise CheckpointError(
            f"The tokenizer {source} has ids up to {size - 1}, but vocab_size is "
            f"{config.vocab_size}.",
            "An id without an embedding row cannot enter the network.",
            "Use the tokenizer.json and config.json of the same checkpoint.",
        )
    framing = {
        "bos_token_id": (spellings.BOS, config.bos_token_id),
        "eos_token_id": (spellings.EOS, config.eos_token_id),
        "pad_token_id": (spellings.PAD, config.pad_token_id),
    }
    for field, (spelling, wanted) in framing.items():
        if added[spelling] != wanted:
            raise CheckpointError(
                f"The config's {field} is {wanted}, but the tokenizer {source} gives {spelling} "
                f"the id {added[spelling]}.",
                "Prompts would be framed, or generation ended, by another token than the model "
                "was trained with.",
                "Use the tokenizer.json and config.json of the same checkpoint.",
            )


def byte_alphabet() -> dict[str, int]:
    """Byte-level BPE's character for each byte, inverted: printable bytes stand for themselves,
    the others for the code points from 256 on, in byte order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}
