"""What makes two prompt prefixes the same, and how much of one is computed again on a hit.

A key names everything that a page's bytes depend on: the model and its formats (the namespace),
the tenant (the salt), every token before and in the page, and the pixels of every image in it.
Keys are SHA-256 over canonical bytes, so that processes and machines agree on them.
"""

import hashlib
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

PAGE = 128
Mode = Literal["exact", "cache_exact", "bounded"]
Kind = Literal["cold", "cache_exact", "bounded"]
# An image: digest of its decoded pixels with their shape and the processor's settings, and the
# half-open range of positions that it fills.
Media = tuple[bytes, int, int]
_KINDS: tuple[Kind, ...] = ("cold", "cache_exact", "bounded")


def root_key(namespace: bytes, salt: bytes) -> bytes:
    """The key before the first page; a namespace or salt of its own opens a space of its own."""
    text = b"di-kv/1\0" + _u32(len(namespace)) + namespace + _u32(len(salt)) + salt
    return hashlib.sha256(text).digest()


def extend_keys(
    keys: Sequence[bytes],
    root: bytes,
    tokens: Sequence[int] | np.ndarray,
    media: Iterable[Media] = (),
    page: int = PAGE,
) -> list[bytes]:
    """The keys of all full pages of `tokens`, given those of the first pages.

    A sequence that grows hashes each page once. A last page that is not full has no key.

    Args:
        keys: keys of the first len(keys) pages, as an earlier call returned them.
        root: from `root_key`.
        tokens: ids from 0 to 2^32 - 1, those of the known pages included.
        media: the images.
        page: tokens of a page.
    """
    images = sorted(media, key=lambda image: image[1])
    grown = list(keys)
    first, last = len(grown), len(tokens) // page
    words = np.asarray(tokens[first * page : last * page]).astype("<u4").tobytes()
    for number in range(first, last):
        begin = number * page
        ids = words[4 * (begin - first * page) :][: 4 * page]
        inside = [m for m in images if m[1] < begin + page and m[2] > begin]
        entries = b"".join(b"M" + d + struct.pack("<i", start - begin) for d, start, _ in inside)
        parent = grown[-1] if grown else root
        text = parent + _u32(page) + ids + _u32(len(inside)) + entries
        grown.append(hashlib.sha256(text).digest())
    return grown


def page_keys(
    namespace: bytes,
    salt: bytes,
    tokens: Sequence[int] | np.ndarray,
    media: Iterable[Media] = (),
    page: int = PAGE,
) -> list[bytes]:
    """The keys of all full pages of `tokens`, 32 bytes each; see `extend_keys`."""
    return extend_keys([], root_key(namespace, salt), tokens, media, page)


@dataclass(frozen=True)
class Provenance:
    """How a page's bytes came about.

    Attributes:
        kind: "cold" pages are those of a run without a hit. "cache_exact" pages have the same
            bytes, by a replay long enough for every layer that writes pages. "bounded" pages
            depend on where their writer's hit ended.
        generation: 0 for a run without a hit, else 1 + the largest of the pages it read.
    """

    kind: Kind = "cold"
    generation: int = 0


def written_after(mode: Mode, chain: Iterable[Provenance]) -> Provenance:
    """The provenance of pages written by a run that read the pages `chain` and replayed in `mode`.

    A page is never better than the worst page below it.
    """
    read = list(chain)
    if not read:
        return Provenance()
    own: Kind = "cold" if mode == "exact" else mode
    kinds: list[Kind] = [own, *(p.kind for p in read)]
    return Provenance(max(kinds, key=_KINDS.index), 1 + max(p.generation for p in read))


def accepts(mode: Mode) -> Callable[[Provenance], bool]:
    """Which pages a request of `mode` may read: if not bounded, those with a cold run's bytes."""
    return lambda provenance: mode == "bounded" or provenance.kind != "bounded"


@dataclass(frozen=True)
class Reuse:
    """How one engine shares prefixes.

    Attributes:
        mode: what a hit promises.
        replay: tokens before the end of a hit that are computed again, from `replay`.
        root: key before the first page, from `root_key`.
    """

    mode: Mode
    replay: int
    root: bytes

    def accepts(self, provenance: Provenance) -> bool:
        """Whether a page may be read."""
        return accepts(self.mode)(provenance)

    def written_after(self, chain: Iterable[Provenance]) -> Provenance:
        """The provenance of pages written by a run that read `chain`."""
        return written_after(self.mode, chain)


def replay(mode: Mode, window: int, layers: int, encoder_layers: int, page: int = PAGE) -> int:
    """How many tokens before the end of a hit are computed again, in whole pages.

    The window entry of layer l at position i depends on inputs down to i - l * (window - 1), so m
    layers beyond the first need m * (window - 1) tokens more than the window itself.

    Args:
        mode: "bounded" rebuilds windows from the window alone, "cache_exact" those of the layers
            before the last that writes pages exactly, "exact" all of them.
        window: keys that a window layer sees.
        layers: of the network.
        encoder_layers: layers before the last that writes pages.
        page: tokens of a page.
    """
    beyond = {"bounded": 0, "cache_exact": encoder_layers - 1, "exact": layers - 1}[mode]
    return -(-(window + beyond * (window - 1)) // page) * page


def hit(matched: int, prompt: int, replay_tokens: int, page: int = PAGE) -> tuple[int, int]:
    """(H, s): positions below H are read from the cache, rows from s on are computed.

    Rows from s to H - 1 only rebuild windows: they must not write pages. The last prompt token is
    always computed, as its logits are needed. A hit that replay would recompute whole is a miss,
    (0, 0), and the matched pages are to be released; else those beyond H are.
    """
    end = page * min(matched, (prompt - 1) // page)
    return (0, 0) if end <= replay_tokens else (end, end - replay_tokens)


def _u32(number: int) -> bytes:
    return struct.pack("<I", number)
