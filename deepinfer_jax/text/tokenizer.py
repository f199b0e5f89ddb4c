"""The byte-level BPE tokenizer of a checkpoint: loading with checks, split encoding, decoding.

Text can never become a special token: plain spans are encoded without the added vocabulary, and
special tokens come only from pieces that say so.
"""

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import CheckpointError, RequestError
from deepinfer_jax.text import spellings
from deepinfer_jax.text.tokenizer_file import (
    byte_alphabet,
    check_fields,
    check_ids,
    damaged,
    parse,
    token_strings,
)

_CACHED_SPAN = 256  # characters; shorter spans cost less to encode than to keep
_CACHE_CHARACTERS = 4_000_000


class Piece(NamedTuple):
    """A stretch of prompt: one special token by its spelling, or plain text."""

    text: str
    special: bool = False


class Tokenizer:
    """A byte-level BPE tokenizer whose special tokens are looked up by spelling.

    Attributes:
        bos_id, eos_id, pad_id: ids of the three framing tokens.
        vocab_size: number of ids the tokenizer defines; ids are 0..vocab_size-1.
        network_vocab_size: the network's vocabulary; ids from `vocab_size` up to it are padding
            rows that stand for no text.
        digest: SHA-256 of `tokenizer.json`, as hexadecimal digits.
    """

    def __init__(self, data: bytes, config: ModelConfig | None, source: str):
        """Build from the bytes of a `tokenizer.json`; `source` names it in errors."""
        spec = parse(data, source)
        check_fields(spec, source)
        self._source = source
        self._added: dict[str, int] = {t["content"]: t["id"] for t in spec["added_tokens"]}
        self._token_strings = token_strings(spec, source)
        check_ids(self._added, len(self._token_strings), config, source)
        self._plain = _plain_encoder(spec, source)
        self._cache: OrderedDict[str, list[int]] = OrderedDict()
        self._cache_characters = 0
        self._cache_lock = threading.Lock()
        self.bos_id = self.special(spellings.BOS)
        self.eos_id = self.special(spellings.EOS)
        self.pad_id = self.special(spellings.PAD)
        self.vocab_size = len(self._token_strings)
        self.network_vocab_size = config.vocab_size if config else self.vocab_size
        self.digest = hashlib.sha256(data).hexdigest()
        self._check_plain_text_is_plain()

    @classmethod
    def from_folder(cls, folder: str | Path, config: ModelConfig | None = None) -> "Tokenizer":
        """Load `tokenizer.json` of a model folder; see `from_file`."""
        return cls.from_file(Path(folder) / "tokenizer.json", config)

    @classmethod
    def from_file(cls, path: str | Path, config: ModelConfig | None = None) -> "Tokenizer":
        """Load a `tokenizer.json` and check it against the format's rules and `config`.

        Raises CheckpointError, naming the field, when the file is missing or damaged, when a
        setting would make split encoding differ from the model's, or when ids do not fit.
        """
        path = Path(path)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise CheckpointError(
                f"There is no tokenizer at {path}.",
                "Text cannot be turned into the ids the network was trained on without it.",
                "Put the checkpoint's tokenizer.json beside its config.json.",
            ) from None
        return cls(data, config, str(path))

    def encode(self, text: str, add_bos: bool = True) -> list[int]:
        """Ids of plain text, BOS first when `add_bos`.

        A BOS spelling at the start of the text is then taken as that BOS, so there is never a
        second one; every other special spelling is ordinary text.
        """
        if not add_bos:
            return self.encode_pieces([Piece(text)])
        rest = text.removeprefix(spellings.BOS)
        return self.encode_pieces([Piece(spellings.BOS, True), Piece(rest)])

    def encode_pieces(self, pieces: Iterable[Piece]) -> list[int]:
        """Ids of one piece list; see `encode_pieces_batch`."""
        return self.encode_pieces_batch([pieces])[0]

    def encode_pieces_batch(self, batch: Sequence[Iterable[Piece]]) -> list[list[int]]:
        """Ids of several piece lists, with one call to the encoder.

        Each special piece is one id by its spelling; each maximal run of plain pieces is encoded
        as one text without the added vocabulary. Raises CheckpointError for a special piece that
        is no token of this tokenizer and RequestError for text that is not valid Unicode.
        """
        rows = [self._segments(pieces) for pieces in batch]
        spans = {part: None for row in rows for part in row if isinstance(part, str)}
        ids = self._encode_spans(list(spans))
        out: list[list[int]] = []
        for row in rows:
            line: list[int] = []
            for part in row:
                if isinstance(part, str):
                    line += ids[part]
                else:
                    line.append(part)
            out.append(line)
        return out

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids, special tokens by their spelling; cut characters become U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 bytes that a token stands for (not always whole characters).

        A padding row of the network stands for no bytes. Raises RequestError for any other id
        outside the vocabulary.
        """
        if 0 <= token_id < self.vocab_size:
            return self._bytes[token_id]
        if self.vocab_size <= token_id < self.network_vocab_size:
            return b""
        raise RequestError(
            f"Token id {token_id} is outside the vocabulary 0..{self.network_vocab_size - 1}.",
            "Only ids of the vocabulary stand for text.",
            "Check where the id comes from.",
        )

    def token_string(self, token_id: int) -> str:
        """The token as `tokenizer.json` writes it (byte-level alphabet for ordinary tokens)."""
        return self._token_strings[token_id]

    def special(self, spelling: str) -> int:
        """Id of an added token. Raises CheckpointError when there is no such token."""
        try:
            return self._added[spelling]
        except KeyError:
            raise CheckpointError(
                f"The tokenizer {self._source} has no special token spelled {spelling!r}.",
                "Prompts of the V4.1 format need it, and ids are looked up by spelling only.",
                "Use the tokenizer.json of a V4.1 checkpoint.",
            ) from None

    @property
    def special_ids(self) -> Mapping[str, int]:
        """Spelling -> id of every added token."""
        return self._added

    @cached_property
    def _bytes(self) -> list[bytes]:
        decoder = byte_alphabet()
        added = set(self._added.values())
        table = []
        for token_id, string in enumerate(self._token_strings):
            values = [decoder.get(c, -1) for c in string]
            plain = token_id not in added and -1 not in values
            table.append(bytes(values) if plain else string.encode())
        return table

    def _segments(self, pieces: Iterable[Piece]) -> list[int | str]:
        row: list[int | str] = []
        run: list[str] = []
        for text, special in pieces:
            if not special:
                run.append(text)
                continue
            if run:
                row.append("".join(run))
                run = []
            row.append(self.special(text))
        if run:
            row.append("".join(run))
        return row

    def _encode_spans(self, spans: Sequence[str]) -> dict[str, list[int]]:
        with self._cache_lock:
            known = {s: self._cache[s] for s in spans if s in self._cache}
            for span in known:
                self._cache.move_to_end(span)
        missing = [s for s in spans if s not in known]
        encoded = dict(zip(missing, self._encode_plain(missing), strict=True))
        with self._cache_lock:
            for span, ids in encoded.items():
                if len(span) >= _CACHED_SPAN and span not in self._cache:
                    self._cache[span] = ids
                    self._cache_characters += len(span)
            while self._cache_characters > _CACHE_CHARACTERS:
                span, _ = self._cache.popitem(last=False)
                self._cache_characters -= len(span)
        return known | encoded

    def _encode_plain(self, texts: Sequence[str]) -> list[list[int]]:
        for text in texts:
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise RequestError(
                    f"The text holds an unpaired surrogate at character {error.start} of "
                    f"{len(text)}.",
                    "It is not valid Unicode and has no UTF-8 bytes to encode.",
                    "Send valid Unicode text.",
                ) from None
        rows = self._plain.encode_batch_fast(list(texts), add_special_tokens=False)
        return [row.ids for row in rows]

    def _check_plain_text_is_plain(self) -> None:
        ids = set(self._added.values())
        texts = list(self._added)
        for text, row in zip(texts, self._encode_plain(texts), strict=True):
            if not ids.isdisjoint(row):
                raise CheckpointError(
                    f"In the tokenizer {self._source} the plain text {text!r} encodes to an id of "
                    "added_tokens.",
                    "A user could forge the prompt's framing by typing a special token.",
                    "Use the tokenizer.json of a V4.1 checkpoint.",
                )


def _plain_encoder(spec: dict[str, Any], source: str) -> tokenizers.Tokenizer:
    """The same BPE without added tokens, so that no text can become one."""
    plain = spec | {"added_tokens": [], "post_processor": None}
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(plain))
    except Exception as error:  # the library raises nothing narrower
        raise damaged(source, error) from None
