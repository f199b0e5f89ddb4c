"""Exact match while training: answers right in every token, per skill and kind, teacher-forced."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh

from deepinfer_jax.skills.conversation import conversation
from deepinfer_jax.skills.families import SKILLS, sample
from deepinfer_jax.skills.lookup import long_document
from deepinfer_jax.skills.sample import HELD_OUT_SEED
from deepinfer_jax.text.tokenizer import Tokenizer
from deepinfer_jax.training.batches import HostBatch, on_devices
from deepinfer_jax.training.nano_data import target_weights

Check = Callable[[Mapping[str, jax.Array], Mapping[str, jax.Array]], jax.Array]


@dataclass(frozen=True)
class Span:
    """An answer: row and the columns [low, high) that predict its tokens."""

    row: int
    low: int
    high: int
    label: str


@dataclass(frozen=True)
class HeldOut:
    """Prepared rows of one shape and the answers in them.

    Attributes:
        batch: ids, segment, skill int32 and weight float32, [rows, t].
        decoder_start: first column that is evaluated.
        spans: the answers.
    """

    batch: dict[str, np.ndarray]
    decoder_start: int
    spans: tuple[Span, ...]


def held_out_short(tokenizer: Tokenizer, rows: int, columns: int, seed: int = 0) -> HeldOut:
    """Packed held-out conversations at full difficulty, skills in turn; final turns are judged."""
    ids = np.full((rows, columns), tokenizer.pad_id, np.int32)
    segment = np.zeros(ids.shape, np.int32)
    used, count, spans = [0] * rows, [0] * rows, []
    names = [name for name in SKILLS if name != "copy"]
    index = misses = 0
    while misses < len(names):
        drawn = sample(names[index % len(names)], HELD_OUT_SEED + seed, index)
        index += 1
        line = np.asarray(tokenizer.encode_pieces(conversation(drawn)), np.int32)
        row = next((r for r in range(rows) if used[r] + len(line) <= columns), None)
        if row is None:
            misses += 1
            continue
        start = used[row]
        count[row] += 1
        used[row] += len(line) + len(line) % 2
        ids[row, start : start + len(line)] = line
        segment[row, start : start + len(line)] = count[row]
        places = np.flatnonzero(target_weights(line, tokenizer, True)) + start
        label = f"{drawn.skill}/{drawn.kind}"
        spans.append(Span(row, int(places[0]), int(places[-1]) + 1, label))
    return _prepared(ids, segment, 0, spans)


def held_out_long(
    tokenizer: Tokenizer, rows: int, columns: int, decoder_rows: int, seed: int = 0
) -> HeldOut:
    """Held-out documents, right-aligned and of growing length; every answer is judged."""
    rng = np.random.default_rng((HELD_OUT_SEED, seed))
    ids = np.full((rows, columns), tokenizer.pad_id, np.int32)
    segment = np.zeros(ids.shape, np.int32)
    spans = []
    for row in range(rows):
        length = int((columns - decoder_rows) * (0.3 + 0.65 * (row + 1) / rows))
        while True:
            drawn = long_document(rng, length, decoder_rows // 40)
            line = np.asarray(tokenizer.encode_pieces(conversation(drawn)), np.int32)
            weight = target_weights(line, tokenizer)
            first = int(np.flatnonzero(weight)[0])
            if len(line) <= columns and len(line) - first < decoder_rows:
                break
        start = columns - len(line) - len(line) % 2
        ids[row, start : start + len(line)] = line
        segment[row, start : start + len(line)] = 1
        label = f"lookup/long<{1024 * (1 + length // 1024)}"
        spans += [Span(row, a + start, b + start, label) for a, b in runs(weight)]
    return _prepared(ids, segment, columns - decoder_rows, spans)


def held_out_of(batches: Sequence[HostBatch], decoder_start: int, names: Sequence[str]) -> HeldOut:
    """Rows out of batches of an unused seed; every run of targets is judged."""
    rows = [row for batch in batches for row in zip(batch.weight, batch.skill, strict=True)]
    spans = [
        Span(number, low, high, names[int(skill[low])])
        for number, (weight, skill) in enumerate(rows)
        for low, high in runs(weight)
    ]
    ids = np.concatenate([b.ids for b in batches])
    return _prepared(ids, np.concatenate([b.segment for b in batches]), decoder_start, spans)


def runs(weight: np.ndarray) -> list[tuple[int, int]]:
    """Maximal stretches [low, high) of positive weight in float32 [t]."""
    edges = np.flatnonzero(np.diff(np.pad(weight > 0, 1).astype(np.int8)))
    return [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def exact_match(
    held_out: HeldOut, check: Check, weights: Mapping[str, jax.Array], mesh: Mesh, rows: int
) -> dict[str, tuple[int, int]]:
    """Right and counted answers per label.

    `check` is a compiled evaluation for batches of `rows` rows; the set must divide by it.
    """
    found: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    correct = []
    for low in range(0, len(held_out.batch["ids"]), rows):
        part = {k: v[low : low + rows] for k, v in held_out.batch.items()}
        correct.append(np.asarray(jax.device_get(check(weights, on_devices(part, mesh)))))
    every = np.concatenate(correct)
    for span in held_out.spans:
        begin, end = span.low - held_out.decoder_start, span.high - held_out.decoder_start
        found[span.label][0] += bool(every[span.row, begin:end].all())
        found[span.label][1] += 1
    return {label: (right, count) for label, (right, count) in sorted(found.items())}


def _prepared(
    ids: np.ndarray, segment: np.ndarray, decoder_start: int, spans: Sequence[Span]
) -> HeldOut:
    batch = {
        "ids": ids,
        "segment": segment,
        "weight": np.zeros(ids.shape, np.float32),
        "skill": np.full(ids.shape, -1, np.int32),
    }
    return HeldOut(batch, decoder_start, tuple(spans))
