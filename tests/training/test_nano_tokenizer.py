"""Nano's tokenizer: ids that the config fixes, whole words, lone digits, a deterministic build."""

import json
from pathlib import Path

import pytest

import deepinfer_jax
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.skills.conversation import conversation
from deepinfer_jax.skills.families import SKILLS, sample
from deepinfer_jax.skills.words import ADJECTIVES, CITIES, NAMES, NOUNS
from deepinfer_jax.text import spellings
from deepinfer_jax.text.compressed_ids import check_compressed_map, compressed_token_map
from deepinfer_jax.text.tokenizer import Tokenizer
from deepinfer_jax.training.nano_tokenizer import SPECIAL, build_tokenizer

NANO = Path(deepinfer_jax.__file__).parent / "models" / "nano"


@pytest.fixture(scope="module")
def config():
    return ModelConfig.from_file(NANO / "config.json")


@pytest.fixture(scope="module")
def tokenizer(config):
    return Tokenizer.from_folder(NANO, config)


def test_the_tokenizer_fills_the_configs_vocabulary(tokenizer, config):
    assert tokenizer.vocab_size == config.vocab_size == 3072
    assert [tokenizer.special(s) for s in SPECIAL] == list(range(len(SPECIAL)))
    assert tokenizer.special(spellings.SYSTEM) == config.dspark_noise_token_id


def test_the_compressed_ids_are_as_many_as_the_config_says(tokenizer, config):
    check_compressed_map(compressed_token_map(tokenizer), config)


def test_words_are_single_tokens_with_and_without_their_space(tokenizer):
    for word in (*NAMES, *CITIES, *ADJECTIVES, *NOUNS):
        assert len(tokenizer.encode(word, False)) == len(tokenizer.encode(f" {word}", False)) == 1


def test_digits_stand_alone(tokenizer):
    assert len(tokenizer.encode("48213", False)) == 5
    assert len(tokenizer.encode("a 48213.", False)) == 8


@pytest.mark.parametrize("skill", SKILLS)
def test_conversations_survive_encoding_and_decoding(skill, tokenizer):
    for i in range(10):
        pieces = conversation(sample(skill, 1, i))
        assert tokenizer.decode(tokenizer.encode_pieces(pieces)) == "".join(p.text for p in pieces)


def test_any_text_survives_encoding_and_decoding(tokenizer):
    text = "Grüße, 世界! \t\r\n  Ω≠🙂 <think> ｜DSML｜ 007"
    ids = tokenizer.encode(text, False)
    assert tokenizer.decode(ids) == text and min(ids) >= len(SPECIAL)


def test_the_build_is_deterministic_and_flags_tokens_as_the_release_does():
    texts = ["Anna lives in Naples.", "Bruno lives in Oslo.", "the theory then there"] * 5
    built = build_tokenizer(iter(texts), 320)
    assert built == build_tokenizer(iter(texts), 320)
    flags = {t["content"]: t["special"] for t in json.loads(built)["added_tokens"]}
    assert flags[spellings.BOS] and flags["<｜box｜>"]
    assert not flags[spellings.USER] and not flags[spellings.IMAGE]
    loaded = Tokenizer(built.encode(), None, "a test")
    assert len(loaded.encode(" lives", False)) == 1
