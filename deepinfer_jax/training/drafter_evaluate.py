"""A trained drafter judged off the engine: greedy speculative decoding, replayed on known answers.

The answers are the target's own greedy ones. What a drafter would propose depends only on tokens
that were emitted before, and those are the answer's; so the drafts of every place of an answer are
computed at once, and which steps decoding would have taken is a walk over them. As in the engine
(which must not launch a step before it has read the one before), a step offers no drafts beyond
the end of the sequence or of the cache page that its first row is in.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Self, get_args

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import CheckpointError
from deepinfer_jax.model.cache import PAGE
from deepinfer_jax.sampling.verified import VerifiedBlock
from deepinfer_jax.training import carry, drafter_state
from deepinfer_jax.training.drafter_blocks import make_blocks
from deepinfer_jax.training.drafter_forward import DrafterOptions, Weights, draft_states, markov
from deepinfer_jax.training.drafter_step import DrafterSettings, Method, begin, drafter_specs
from deepinfer_jax.training.eagle3 import eagle3_drafts
from deepinfer_jax.training.engram import table_rows
from deepinfer_jax.training.forward import ForwardOptions, forward
from deepinfer_jax.training.quantize import round_tensors

Tell = Callable[[int, int], None]
_POSITIONS = 4096  # of a batch: what it takes to keep two cores busy, and little memory
_ANCHORS = 32  # of a row
_FROZEN = ("embed.weight", "head.weight")


@dataclass(frozen=True)
class Answered:
    """A prompt and the target's greedy answer to it.

    Attributes:
        prompt, answer: token ids, at least one of each; an end-of-sequence token included.
        limit: longest sequence of both, in tokens.
    """

    prompt: Sequence[int]
    answer: Sequence[int]
    limit: int

    @property
    def known(self) -> np.ndarray:
        """All tokens but the last, int32: those that something is drafted after."""
        return np.array([*self.prompt, *self.answer[:-1]], np.int32)


@dataclass(frozen=True)
class Drafted:
    """What would be drafted after each of an answer's n tokens but the last.

    Attributes:
        tokens: int32 [n - 1, g].
        logits: float32 [n - 1, g], of the confidence; None without a confidence head.
    """

    tokens: np.ndarray
    logits: np.ndarray | None


class Target:
    """The frozen target, and what a drafter reads of it."""

    def __init__(
        self,
        weights: Mapping[str, np.ndarray],
        config: ModelConfig,
        token_map: np.ndarray,
        *,
        quantize: bool,
    ):
        """Hold it.

        Args:
            weights: float32 by training name, as stored. config: numbers.
            token_map: int32 [vocab], compressed token ids.
            quantize: keys are rounded as caches of the release store them.
        """
        self.config, self.quantize = config, quantize
        self._weights = jax.device_put(dict(weights), jax.devices()[0])
        self._token_map = token_map
        self._told = jax.jit(self._forward)

    @classmethod
    def from_folder(
        cls, folder: Path, config: ModelConfig, token_map: np.ndarray, *, quantize: bool
    ) -> Self:
        """That of a model folder. Raises CheckpointError when it does not fit `config`."""
        return cls(
            carry.from_model(folder, config, 0).weights, config, token_map, quantize=quantize
        )

    @property
    def frozen(self) -> Weights:
        """The embedding and the head, which drafters share."""
        return {name: self._weights[name] for name in _FROZEN}

    def taps(self, answers: Sequence[Answered], tell: Tell | None = None) -> list[np.ndarray]:
        """Of each answer float32 [tokens of `known`, m d], the taps at each position.

        `tell` is called with (answers done, all).
        """
        groups: dict[int, list[int]] = defaultdict(list)
        for place, answered in enumerate(answers):
            groups[_columns(len(answered.known), self.config)].append(place)
        found: dict[int, np.ndarray] = {}
        for columns, places in sorted(groups.items()):
            rows = max(1, _POSITIONS // columns)
            for at in range(0, len(places), rows):
                ids = np.zeros((rows, columns), np.int32)
                segment = np.zeros_like(ids)
                for row, place in enumerate(places[at : at + rows]):
                    known = answers[place].known
                    ids[row, : len(known)], segment[row, : len(known)] = known, 1
                with _exact():
                    taps = np.asarray(self._told(self._weights, ids, segment))
                for row, place in enumerate(places[at : at + rows]):
                    found[place] = taps[row, : len(answers[place].known)].copy()
                if tell is not None:
                    tell(len(found), len(answers))
        return [found[place] for place in range(len(answers))]

    def _forward(self, weights: Weights, ids: jax.Array, segment: jax.Array) -> jax.Array:
        columns = ids.shape[1]
        options = ForwardOptions(
            quantize_caches=self.quantize,
            chunk=0 if columns == _columns(1, self.config) else columns // 4,
        )
        hashes = table_rows(self._token_map, ids, segment, self.config)
        result = forward(weights, ids, segment, hashes, self.config, options)
        assert result.taps is not None
        return result.taps


class Drafter:
    """A drafter in training form that proposes greedily.

    Attributes:
        method: what it is. step: updates it was trained for, None when that is not known.
    """

    def __init__(
        self,
        method: Method,
        weights: Mapping[str, np.ndarray],
        config: ModelConfig,
        *,
        quantize: bool,
        step: int | None = None,
    ):
        """Hold it.

        Args:
            method, config: what it is, and its numbers.
            weights: float32 masters by training name; they are rounded to the release's formats.
            quantize: as in `Target`.
        """
        self.method: Method = method
        self.step, self._config = step, config
        self._options = DrafterOptions(quantize=quantize, heads=method == "dspark")
        masters = {name: jnp.asarray(value) for name, value in weights.items()}
        self._weights = round_tensors(masters, drafter_specs(method, config))
        self._propose = jax.jit(self._chains if method == "eagle3" else self._blocks)

    @classmethod
    def from_folder(cls, folder: Path, config: ModelConfig, *, quantize: bool) -> Self:
        """That of a training run's folder, as its last state stands.

        Raises CheckpointError for a folder without a state, an unknown method, or a drafter of
        another network.
        """
        header = drafter_state.read_header(folder)
        if header.method not in get_args(Method):
            raise CheckpointError(
                f"{folder} holds a drafter of method {header.method!r}.",
                f"Methods that can be judged are {', '.join(get_args(Method))}.",
                "Give the folder of a run with one of them.",
            )
        method: Method = header.method  # type: ignore[assignment]
        state = drafter_state.load(folder, begin(method, config, DrafterSettings()))
        return cls(
            method, jax.device_get(state.weights), config, quantize=quantize, step=header.step
        )

    def draft(
        self, frozen: Weights, answers: Sequence[Answered], taps: Sequence[np.ndarray]
    ) -> list[Drafted]:
        """What it proposes along each answer.

        Args:
            frozen: of the target. answers: at least two tokens in each. taps: of the target, too.
        """
        g = self._config.dspark_block_size
        tokens = [np.zeros((len(a.answer) - 1, g), np.int32) for a in answers]
        logits = [np.zeros((len(a.answer) - 1, g), np.float32) for a in answers]
        groups: dict[int, list[_Row]] = defaultdict(list)
        for row in self._rows(answers):
            groups[row.columns].append(row)
        for columns, rows in sorted(groups.items()):
            size = max(1, _POSITIONS // columns)
            for at in range(0, len(rows), size):
                members = rows[at : at + size]
                batch = _batch(members, size, answers, taps)
                with _exact():
                    made = self._propose(self._weights, frozen, *batch)
                drafted, sure = (np.asarray(x) for x in made)
                for number, row in enumerate(members):
                    here = slice(row.first, row.first + row.count)
                    tokens[row.answer][here] = drafted[number, : row.count]
                    logits[row.answer][here] = sure[number, : row.count]
        heads = self._options.heads
        return [Drafted(t, c if heads else None) for t, c in zip(tokens, logits, strict=True)]

    def _rows(self, answers: Sequence[Answered]) -> Iterator["_Row"]:
        """An answer in rows of at most so many anchors, each with the context that they see."""
        window = self._config.sliding_window
        for place, answered in enumerate(answers):
            last = len(answered.answer) - 1
            for first in range(0, last, _ANCHORS):
                count = min(_ANCHORS, last - first)
                if self.method == "eagle3":
                    start, columns = 0, _columns(len(answered.known), self._config)
                else:
                    start, columns = len(answered.prompt) + first - window, window + _ANCHORS
                yield _Row(place, first, count, start, columns)

    def _blocks(
        self,
        weights: Weights,
        frozen: Weights,
        ids: jax.Array,
        segment: jax.Array,
        taps: jax.Array,
        anchors: jax.Array,
        keep: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        config = self._config
        blocks = make_blocks(
            ids,
            segment,
            segment > 0,
            anchors,
            keep,
            size=config.dspark_block_size,
            noise=config.dspark_noise_token_id,
        )
        z, base, _ = draft_states(weights, frozen, taps, segment, blocks, config, self._options)
        if not self._options.heads:
            return _likeliest(base), jnp.zeros(base.shape[:-1], jnp.float32)
        previous, tokens, sure = blocks.inputs[:, :, 0], [], []
        for place in range(config.dspark_block_size):
            logits, confidence = markov(
                weights, z[:, :, place], base[:, :, place], previous, config
            )
            previous = _likeliest(logits)
            tokens.append(previous)
            sure.append(confidence)
        return jnp.stack(tokens, axis=-1), jnp.stack(sure, axis=-1)

    def _chains(
        self,
        weights: Weights,
        frozen: Weights,
        ids: jax.Array,
        segment: jax.Array,
        taps: jax.Array,
        anchors: jax.Array,
        keep: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        del segment, keep  # a row is one sequence, and what a dummy drafts is not read
        chains = jnp.maximum(anchors, 1)
        tokens = eagle3_drafts(weights, frozen, taps, ids, chains, self._config, self._options)
        return tokens, jnp.zeros(tokens.shape, jnp.float32)


@dataclass(frozen=True)
class _Row:
    """Anchors `first` to `first` + `count` of an answer, in a row that begins at position `start`.

    `start` may lie before the sequence.
    """

    answer: int
    first: int
    count: int
    start: int
    columns: int


def judge(
    target: Target, drafter: Drafter, answers: Sequence[Answered], taps: Sequence[np.ndarray]
) -> list[list[VerifiedBlock]]:
    """The blocks that greedy decoding with a drafter would have verified, per answer.

    `taps` are those of `target.taps(answers)`, which several drafters may share.
    """
    drafted = drafter.draft(target.frozen, answers, taps)
    return [replay(d, a) for d, a in zip(drafted, answers, strict=True)]


def replay(drafted: Drafted, answered: Answered) -> list[VerifiedBlock]:
    """The walk of greedy decoding along an answer, with what would be drafted at each place.

    A step keeps the drafts that equal the answer, and emits one token more. It offers no more
    drafts than the sequence and the page have room for; a step without any is no block.
    """
    answer, prompt = np.asarray(answered.answer), len(answered.prompt)
    blocks, at, last = [], 0, len(answered.answer) - 1
    while at < last:
        rest = answer[at + 1 :]
        position = prompt + at
        room = min(answered.limit - 2 - position, PAGE - 1 - position % PAGE)
        offered = min(drafted.tokens.shape[1], room)
        compared = min(offered, len(rest))
        same = drafted.tokens[at, :compared] == rest[:compared]
        # The answer's last token ends it, whether it was drafted or not.
        accepted = min(int(np.cumprod(same).sum()), len(rest) - 1)
        if offered > 0:
            logits = None if drafted.logits is None else tuple(drafted.logits[at].tolist())
            ended = accepted == len(rest) - 1
            blocks.append(VerifiedBlock(offered, accepted, logits, ended))
        at += accepted + 1
    return blocks


def _exact() -> AbstractContextManager[None]:
    """float32 products stay float32 on a GPU too."""
    return jax.default_matmul_precision("highest")


def _columns(length: int, config: ModelConfig) -> int:
    """Columns of a row for a sequence: of few sizes, as each is compiled."""
    columns = 2 * config.sliding_window
    while columns < length:
        columns *= 4
    return columns


def _batch(
    members: Sequence[_Row], rows: int, answers: Sequence[Answered], taps: Sequence[np.ndarray]
) -> tuple[np.ndarray, ...]:
    """ids, segment int32 [b, t], taps float32 [b, t, m d], anchors int32, keep bool [b, a]."""
    columns = members[0].columns
    ids = np.zeros((rows, columns), np.int32)
    segment, told = np.zeros_like(ids), np.zeros((*ids.shape, taps[0].shape[1]), np.float32)
    anchors = np.zeros((rows, _ANCHORS), np.int32)
    keep = np.zeros(anchors.shape, bool)
    for number, row in enumerate(members):
        known = answers[row.answer].known
        low, high = max(0, row.start), min(row.start + columns, len(known))
        here = np.s_[number, low - row.start : high - row.start]
        ids[here], segment[here] = known[low:high], 1
        told[here] = taps[row.answer][low:high]
        begin = len(answers[row.answer].prompt) + row.first - row.start
        keep[number, : row.count] = True
        anchors[number, : row.count] = begin + np.arange(row.count)
    return ids, segment, told, anchors, keep


def _likeliest(logits: jax.Array) -> jax.Array:
    """int32, the token of the largest logit; of equal ones the lowest."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)
