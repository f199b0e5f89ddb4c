"""Batches for the training of nano: packed short conversations and long documents, and the worker
processes that make them. A batch is a function of its request alone, so a resumed run goes on
exactly.
"""

import argparse
import multiprocessing
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal, Self

import numpy as np

from deepinfer_jax.errors import ConfigError
from deepinfer_jax.skills import mixture
from deepinfer_jax.skills.conversation import conversation
from deepinfer_jax.skills.draws import between, chance, ramp
from deepinfer_jax.skills.families import SKILLS
from deepinfer_jax.skills.lookup import long_document
from deepinfer_jax.skills.sample import HELD_OUT_SEED, Sample
from deepinfer_jax.text import spellings
from deepinfer_jax.text.tokenizer import Tokenizer
from deepinfer_jax.training.nano_tokenizer import write_tokenizer

NANO = Path(__file__).parent.parent / "models" / "nano"
"""Folder of the shipped model: config.json, tokenizer.json, model.safetensors."""

SHORT_SHAPE = (32, 1024)
LONG_SHAPE = (8, 4096)
DECODER_ROWS = 512
"""Positions at the end of a long row that the decoder layers run on; all its targets are there."""

_MEAN_TOKENS = 110  # of a short conversation; only decides how many are drawn at a time
_FULL = 0.985  # share of a short batch's positions that is drawn for
_TURN_TOKENS = 23  # of a question with its answer, with a little room
_LONGEST_DOCUMENT = 3540
_EASY_DOCUMENT = 600


@dataclass(frozen=True)
class Request:
    """Names one batch: its shape, seed, number and difficulty in 0..1."""

    shape: Literal["short", "long"]
    seed: int
    index: int
    level: float


@dataclass(frozen=True)
class Batch:
    """Token rows of one step; [B, T] = [32, 1024] (short) or [8, 4096] (long).

    Attributes:
        ids: int32 [B, T]; the padding token where no conversation stands.
        segment: int32 [B, T]; 1, 2, ... the conversations of a row, 0 padding. Segments start at
            even positions.
        weight: float32 [B, T]; loss weight of position t for predicting ids[t+1]: the assistant's
            own tokens, EOS included. 1/sqrt(run length) inside a run of answer or reasoning,
            scaled to a mean of 1 over the positions that have a target.
        skill: int8 [B, T]; number in `families.SKILLS`, -1 padding.
        decoder_start: first position that the decoder layers need; 0 for short rows.
    """

    ids: np.ndarray
    segment: np.ndarray
    weight: np.ndarray
    skill: np.ndarray
    decoder_start: int


def vocabulary_texts(tokenizer: Tokenizer) -> tuple[str, ...]:
    """Texts of the entries that are whole characters and no special token, for copying."""
    special = set(tokenizer.special_ids.values())
    texts = (tokenizer.decode([i]) for i in range(tokenizer.vocab_size) if i not in special)
    return tuple(t for t in texts if "\ufffd" not in t and (t.isprintable() or t == "\n"))


def make_batch(
    request: Request,
    tokenizer: Tokenizer,
    vocabulary: Sequence[str] = (),
    parts: Mapping[str, float] = mixture.SHARES,
) -> Batch:
    """The batch of a request.

    `vocabulary` is that of `vocabulary_texts`; `parts` are the skills' relative shares.

    Raises ConfigError for a seed of the held-out range.
    """
    if not 0 <= request.seed < HELD_OUT_SEED:
        raise ConfigError(
            f"A training batch was asked for with seed {request.seed}.",
            f"Training uses seeds 0..{HELD_OUT_SEED - 1}; the others are held out for evaluation.",
            "Use a seed of the training range.",
        )
    rng = np.random.default_rng((request.seed, request.index, request.shape == "long"))
    if request.shape == "long":
        return _long_batch(rng, request.level, tokenizer)
    return _short_batch(rng, request.level, tokenizer, vocabulary, parts)


def target_weights(ids: np.ndarray, tokenizer: Tokenizer, final_only: bool = False) -> np.ndarray:
    """Unscaled loss weights of one conversation, float32 [T] at the positions before the targets.

    ids: int32 [T]. A target is a token after an assistant header up to and including EOS. The
    reasoning with its closing mark and the answer are two runs; an empty reasoning joins the
    answer. A token of a run of n tokens weighs 1/sqrt(n).
    """
    weight = np.zeros(len(ids), np.float32)
    starts = np.flatnonzero(ids == tokenizer.special(spellings.ASSISTANT)) + 2
    ends = np.flatnonzero(ids == tokenizer.eos_id) + 1
    think_end = tokenizer.special(spellings.THINK_END)
    for start in starts[-1:] if final_only else starts:
        end = ends[np.searchsorted(ends, start, "right")]
        split = start
        if ids[start - 1] != think_end:
            split = start + int(np.argmax(ids[start:end] == think_end)) + 1
            split = start if split == start + 1 else split
        for low, high in ((start, split), (split, end)):
            weight[low - 1 : high - 1] = 1 / np.sqrt(max(high - low, 1))
    return weight


class Producer:
    """Worker processes that make batches ahead of the training loop, in order.

    Use as a context manager, and enter it before the accelerator is touched.
    """

    def __init__(
        self,
        folder: str | Path = NANO,
        workers: int = 8,
        parts: Mapping[str, float] = mixture.SHARES,
    ):
        """Hold what batches are made of.

        `folder` holds tokenizer.json; `workers` processes start on entry; `parts` are the skills'
        relative shares.
        """
        self._folder, self._workers, self._parts = str(folder), workers, dict(parts)
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(self._workers, context, _source, (self._folder,))
        for future in [self._pool.submit(_ready, self._folder) for _ in range(self._workers)]:
            future.result()
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def batches(self, requests: Iterable[Request], ahead: int = 4) -> Iterator[Batch]:
        """The batches of the requests, in order, with `ahead` per worker under way.

        Raises ConfigError when the producer has not been entered.
        """
        if self._pool is None:
            raise ConfigError(
                f"The producer of {self._workers} workers is not running.",
                "Its processes live only inside its with-block.",
                "Enter it before asking for batches.",
            )
        waiting: deque[Future[Batch]] = deque()
        for request in requests:
            waiting.append(self._pool.submit(_work, self._folder, request, self._parts))
            if len(waiting) > self._workers * ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _short_batch(
    rng: np.random.Generator,
    level: float,
    tokenizer: Tokenizer,
    vocabulary: Sequence[str],
    parts: Mapping[str, float],
) -> Batch:
    rows, width = SHORT_SHAPE
    drawn: list[tuple[Sample, list[int]]] = []
    missing = int(rows * width * _FULL)
    while missing > 0:
        samples = mixture.draw(rng, level, max(missing // _MEAN_TOKENS, 4), vocabulary, parts)
        lines = tokenizer.encode_pieces_batch([conversation(s) for s in samples])
        for sample, line in zip(samples, lines, strict=True):
            if len(line) <= width:
                drawn.append((sample, line))
                missing -= len(line) + len(line) % 2
    batch = _empty(SHORT_SHAPE, tokenizer, 0)
    used = np.zeros(rows, np.int64)
    count = np.zeros(rows, np.int64)
    # Long conversations first, each into the fullest row that still has room.
    for sample, line in sorted(drawn, key=lambda pair: -len(pair[1])):
        fits = np.where(used + len(line) <= width, used, -1)
        row = int(np.argmax(fits))
        if fits[row] < 0:
            continue
        count[row] += 1
        _place(batch, row, int(used[row]), int(count[row]), sample, line, tokenizer)
        used[row] += len(line) + len(line) % 2
    return _scaled(batch)


def _long_batch(rng: np.random.Generator, level: float, tokenizer: Tokenizer) -> Batch:
    rows, width = LONG_SHAPE
    batch = _empty(LONG_SHAPE, tokenizer, width - DECODER_ROWS)
    for row in range(rows):
        sample, line = _long_row(rng, ramp(level, _EASY_DOCUMENT, _LONGEST_DOCUMENT), tokenizer)
        _place(batch, row, width - len(line) - len(line) % 2, 1, sample, line, tokenizer)
    return _scaled(batch)


def _long_row(
    rng: np.random.Generator, longest: int, tokenizer: Tokenizer
) -> tuple[Sample, list[int]]:
    """One document with as many questions as the decoder's positions hold."""
    questions = DECODER_ROWS // _TURN_TOKENS
    while True:
        most = between(rng, 200, longest) if chance(rng, 0.25) else longest
        tokens = between(rng, max(200, int(0.75 * most)), most)
        sample = long_document(rng, tokens, questions, thinking=chance(rng, 0.25))
        line = tokenizer.encode_pieces(conversation(sample))
        first = line.index(tokenizer.special(spellings.ASSISTANT))
        if len(line) <= LONG_SHAPE[1] and len(line) - first < DECODER_ROWS:
            return sample, line


def _empty(shape: tuple[int, int], tokenizer: Tokenizer, decoder_start: int) -> Batch:
    return Batch(
        ids=np.full(shape, tokenizer.pad_id, np.int32),
        segment=np.zeros(shape, np.int32),
        weight=np.zeros(shape, np.float32),
        skill=np.full(shape, -1, np.int8),
        decoder_start=decoder_start,
    )


def _place(
    batch: Batch,
    row: int,
    start: int,
    segment: int,
    sample: Sample,
    line: list[int],
    tokenizer: Tokenizer,
) -> None:
    ids = np.asarray(line, np.int32)
    here = np.s_[row, start : start + len(ids)]
    batch.ids[here] = ids
    batch.segment[here] = segment
    batch.weight[here] = target_weights(ids, tokenizer, sample.loss == "final")
    batch.skill[here] = SKILLS.index(sample.skill)


def _scaled(batch: Batch) -> Batch:
    targets = batch.weight > 0
    batch.weight[targets] /= batch.weight[targets].mean()
    return batch


@lru_cache(maxsize=1)
def _source(folder: str) -> tuple[Tokenizer, tuple[str, ...]]:
    tokenizer = Tokenizer.from_folder(folder)
    return tokenizer, vocabulary_texts(tokenizer)


def _ready(folder: str) -> int:
    return len(_source(folder)[1])


def _work(folder: str, request: Request, parts: Mapping[str, float]) -> Batch:
    return make_batch(request, *_source(folder), parts)


def main() -> None:
    """Rebuild nano's tokenizer.json: `python -m deepinfer_jax.training.nano_data`."""
    parser = argparse.ArgumentParser(description="Data of the nano model.")
    parser.add_argument(
        "--build-tokenizer", action="store_true", required=True, help="write tokenizer.json"
    )
    parser.add_argument("--output", type=Path, default=NANO / "tokenizer.json")
    write_tokenizer(parser.parse_args().output)


if __name__ == "__main__":
    main()
