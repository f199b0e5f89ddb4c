"""Builds nano's tokenizer: byte-level BPE over generated conversations, release spellings first.

Digits stand alone and a word takes its leading space, so numbers are copied digit by digit and
nearly every word of the skills is one token. The build is deterministic.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import Regex, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as BpeTokenizer

from deepinfer_jax.files import replacing
from deepinfer_jax.skills import facts
from deepinfer_jax.skills.conversation import conversation
from deepinfer_jax.skills.engine_facts import FACTS
from deepinfer_jax.skills.families import SKILLS, sample
from deepinfer_jax.skills.words import ADJECTIVES, CITIES, NAMES, NOUNS
from deepinfer_jax.text import spellings

VOCAB_SIZE = 3072
"""Ids in all: special spellings, 256 bytes, merges."""

_GROUNDING = tuple(
    f"<｜{slash}{mark}｜>" for mark in ("polygon", "point", "box", "ref") for slash in ("/", "")
)
SPECIAL = (*spellings.RENDERED, *_GROUNDING)
"""Special tokens in the order of their ids; the first four are the config's BOS, EOS, PAD and
DSpark noise."""

# In the release only framing and grounding tokens carry the flag `special`.
_FLAGGED = frozenset({spellings.BOS, spellings.EOS, spellings.PAD, *_GROUNDING})
_PATTERN = r" ?\p{L}+| ?[^\s\p{L}\p{N}]+|[\r\n]+|\s+(?!\S)|\s+"
_SEED = 2**31 - 1  # a training seed
_SAMPLES = 400
_WORD_REPEATS = 250
_FACT_REPEATS = 12


def build_tokenizer(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> str:
    """The text of a `tokenizer.json` with `vocab_size` ids, its merges learned from `texts`."""
    tokenizer = BpeTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"),
            pre_tokenizers.Split(Regex(_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    spec = json.loads(tokenizer.to_str())
    for token in spec["added_tokens"]:
        flagged = token["content"] in _FLAGGED
        token["special"] = flagged
        token["normalized"] = not flagged and token["content"] != spellings.IMAGE
    return json.dumps(spec, ensure_ascii=False, separators=(",", ":"))


def write_tokenizer(path: Path) -> None:
    """Build nano's `tokenizer.json` and write it, replacing an old one only when complete."""
    text = build_tokenizer(corpus())
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def corpus() -> Iterator[str]:
    """The texts nano's merges are learned from: samples of every skill, all words, all facts."""
    for skill in SKILLS:
        for index in range(_SAMPLES):
            for text, special in conversation(sample(skill, _SEED, index)):
                if not special:
                    yield text
    words = (*NAMES, *CITIES, *ADJECTIVES, *NOUNS)
    for _ in range(_WORD_REPEATS):
        yield "\n".join(f" {word}\n{word}" for word in words)
    for form, topic, answer in FACTS:
        wordings = (*facts.WORDINGS[form], *facts.HELD_OUT_WORDINGS[form])
        for repeat in range(_FACT_REPEATS):
            yield wordings[repeat % len(wordings)].format(x=topic)
            yield answer
