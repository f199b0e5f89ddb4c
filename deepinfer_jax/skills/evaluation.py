"""The suite that grades the nano model: held-out prompts, exact-match grading, rows of results.

The engine is injected as a function from prompt ids to output ids, so nothing here computes.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from deepinfer_jax.errors import ConfigError
from deepinfer_jax.skills import documents, facts
from deepinfer_jax.skills.conversation import prompt
from deepinfer_jax.skills.engine_facts import FACTS
from deepinfer_jax.skills.families import sample as draw_sample
from deepinfer_jax.skills.lookup import at_distance
from deepinfer_jax.skills.sample import HELD_OUT_SEED, Sample
from deepinfer_jax.skills.tool_calls import expected_call
from deepinfer_jax.text.events import Answer
from deepinfer_jax.text.parse import parse_ids
from deepinfer_jax.text.tokenizer import Piece, Tokenizer

BANDS = ((0, 128), (128, 512), (512, 1024), (1024, 2048), (2048, 3800))
"""Half-open ranges of the distance in tokens from the asked value to the answer."""

Generate = Callable[[Sequence[Sequence[int]], int], Sequence[Sequence[int]]]
"""(prompt ids, max_tokens) -> generated ids, greedy, EOS included when it was generated."""


@dataclass(frozen=True)
class Entry:
    """One line of the suite.

    Attributes:
        name: name of the line.
        make: (held-out seed, index) -> sample. The facts are the same under every seed.
        max_tokens: enough for every right output.
        required: least accuracy in 0..1, or None when it is only reported.
        count: number of prompts.
        unique: whether repeated prompts are skipped.
    """

    name: str
    make: Callable[[int, int], Sample]
    max_tokens: int
    required: float | None = None
    count: int = 500
    unique: bool = True

    def samples(self, seed: int = HELD_OUT_SEED, count: int | None = None) -> list[Sample]:
        """The first `count` (default: the entry's) samples of a held-out seed.

        Raises ConfigError for a training seed.
        """
        if seed < HELD_OUT_SEED:
            raise ConfigError(
                f"The suite was asked for seed {seed}.",
                f"Seeds below {HELD_OUT_SEED} are trained on.",
                "Use a held-out seed.",
            )
        wanted = self.count if count is None else count
        found: list[Sample] = []
        seen: set[str] = set()
        for sample in self._all(seed):
            key = json.dumps(sample.messages[:-1]) if self.unique else str(len(found))
            if len(found) == wanted:
                break
            if key not in seen:
                seen.add(key)
                found.append(sample)
        return found

    def _all(self, seed: int) -> Iterator[Sample]:
        index = 0
        while True:
            yield self.make(seed, index)
            index += 1


@dataclass(frozen=True)
class Result:
    """One graded answer; `label` names a finer row ("" for none)."""

    name: str
    label: str
    correct: bool


@dataclass(frozen=True)
class Row:
    """Accuracy of one line: `accuracy` and its standard error `stderr` in 0..1 over `n` prompts.

    `required` is the least accuracy asked for, or None.
    """

    skill: str
    n: int
    accuracy: float
    stderr: float
    required: float | None = None

    @property
    def passed(self) -> bool:
        """Whether the requirement, if any, is met."""
        return self.required is None or self.accuracy >= self.required


def _from_family(skill: str) -> Callable[[int, int], Sample]:
    return lambda seed, index: draw_sample(skill, seed, index, 1.0)


def _from_lookup(kind: str) -> Callable[[int, int], Sample]:
    def make(seed: int, index: int) -> Sample:
        rng = np.random.default_rng((seed, index, documents.KINDS.index(kind)))
        return at_distance(rng, kind, *BANDS[index % len(BANDS)])

    return make


def _from_facts(held_out: bool) -> Callable[[int, int], Sample]:
    """Every (topic, wording) pair in turn, each with and without thinking; the seed is unused."""

    def make(seed: int, index: int) -> Sample:
        del seed
        return facts.question(index // 2, "held_out" if held_out else "train", index % 2 == 0)

    return make


# Facts are asked in four of the trained wordings and in both held-out ones, each in both modes.
SUITE: tuple[Entry, ...] = (
    Entry("sum_worked", _from_family("sum_worked"), 160, 0.97, 1000),
    Entry("lookup_code", _from_lookup("code"), 24, 0.97),
    Entry("lookup_city", _from_lookup("city"), 24, 0.90),
    Entry("lookup_pair", _from_lookup("pair"), 24, 0.90),
    Entry("facts", _from_facts(False), 64, 0.98, 8 * len(FACTS), unique=False),
    Entry("facts_held_out_wording", _from_facts(True), 64, None, 4 * len(FACTS), unique=False),
    Entry("sort", _from_family("sort"), 64, 0.90),
    Entry("reverse", _from_family("reverse"), 64, 0.90),
    Entry("json", _from_family("json"), 96, 0.90),
    Entry("tool_call", _from_family("tool_call"), 96, 0.90),
    Entry("follow_up", _from_family("follow_up"), 128, 0.85),
    Entry("sum_direct", _from_family("sum_direct"), 12),
    Entry("count", _from_family("count"), 8),
    Entry("tool_reply", _from_family("tool_reply"), 32),
)
"""Every line, in report order; those with `required` must pass."""


def prompt_ids(sample: Sample, tokenizer: Tokenizer) -> list[int]:
    """Token ids of the prompt that asks for the sample's answer."""
    return tokenizer.encode_pieces(prompt(sample).pieces)


def read(sample: Sample, output: Sequence[int], tokenizer: Tokenizer) -> Answer:
    """Parse generated ids; without EOS the answer's finish reason is "length"."""
    ids = list(output)
    finish = "length"
    if tokenizer.eos_id in ids:
        ids, finish = ids[: ids.index(tokenizer.eos_id)], "stop"
    return parse_ids(ids, prompt(sample).parsing, tokenizer, finish)


def grade(sample: Sample, answer: Answer) -> bool:
    """Whether a finished answer is right: exact text; JSON also valid; for a tool call the name
    and arguments equal, one call and no text beside it.
    """
    if answer.finish_reason == "length":
        return False
    if sample.skill == "tool_call":
        calls = [(call.name, _object(call.arguments)) for call in answer.tool_calls]
        return calls == [expected_call(sample)] and not answer.content.strip()
    if answer.tool_calls:
        return False
    if sample.skill == "json" and _object(answer.content) is None:
        return False
    return answer.content == sample.answer


def copies_some_value(sample: Sample, answer: Answer) -> bool:
    """Lookups: whether the answer states any value of the asked kind that the document holds.

    A model that copied values without looking at the key would score this much.
    """
    asked = documents.values(answer.content, sample.kind)
    text = str(next(m["content"] for m in sample.messages if m["role"] == "user"))
    return bool(asked) and asked <= documents.values(text, sample.kind)


def distance(sample: Sample, tokenizer: Tokenizer) -> int:
    """Lookups: tokens from the first of the asked value up to the end of the prompt."""
    pieces = prompt(sample).pieces
    at = next(i for i, p in enumerate(pieces) if sample.needle in p.text)
    text = pieces[at].text
    start = text.index(sample.needle)
    end = start + sample.needle.index(sample.value)
    before = [*pieces[:at], Piece(text[:end].rstrip())]
    return len(tokenizer.encode_pieces(pieces)) - len(tokenizer.encode_pieces(before))


def evaluate(
    generate: Generate,
    tokenizer: Tokenizer,
    suite: Sequence[Entry] = SUITE,
    *,
    seed: int = HELD_OUT_SEED,
    count: int | None = None,
) -> list[Row]:
    """Run the suite and return its rows: each line, then its finer rows (kinds, bands).

    Args:
        generate: greedy decoding; see `Generate`.
        tokenizer: the model's tokenizer.
        suite: lines to run.
        seed: held-out seed; another one gives other prompts, except of the facts.
        count: prompts per line instead of the line's own number.
    """
    rows: list[Row] = []
    for entry in suite:
        samples = entry.samples(seed, count)
        outputs = generate([prompt_ids(s, tokenizer) for s in samples], entry.max_tokens)
        results: list[Result] = []
        for sample, output in zip(samples, outputs, strict=True):
            answer = read(sample, output, tokenizer)
            correct = grade(sample, answer)
            results.append(Result(entry.name, _label(sample, tokenizer), correct))
            if sample.skill == "lookup":
                copied = copies_some_value(sample, answer)
                results.append(Result(f"{entry.name}_any_value", "", copied))
        rows += summarize(results, {entry.name: entry.required})
    return rows


def summarize(
    results: Sequence[Result], required: dict[str, float | None] | None = None
) -> list[Row]:
    """Rows of graded answers: one per name in order of appearance, each followed by its labels."""
    rows: list[Row] = []
    for name in dict.fromkeys(r.name for r in results):
        mine = [r for r in results if r.name == name]
        rows.append(_row(name, mine, (required or {}).get(name)))
        labels = sorted({r.label for r in mine if r.label})
        rows += [_row(f"{name}/{x}", [r for r in mine if r.label == x], None) for x in labels]
    return rows


def _row(skill: str, results: Sequence[Result], required: float | None) -> Row:
    n = len(results)
    accuracy = sum(r.correct for r in results) / n
    return Row(skill, n, accuracy, math.sqrt(accuracy * (1 - accuracy) / n), required)


def _label(sample: Sample, tokenizer: Tokenizer) -> str:
    if sample.skill != "lookup":
        return sample.kind
    tokens = distance(sample, tokenizer)
    low, high = next((b for b in BANDS if b[0] <= tokens < b[1]), (BANDS[-1][1], 4096))
    return f"{low:04d}-{high}"


def _object(text: str) -> object:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
