"""The Engram's compressed token ids."""

from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from text import tiny_tokenizer
from text.chat_cases import cases

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import CheckpointError
from deepinfer_jax.text.compressed_ids import (
    check_compressed_map,
    compressed_token_map,
    token_normalizer,
)
from deepinfer_jax.text.tokenizer import Tokenizer


def test_texts_normalise_as_recorded():
    normalizer = token_normalizer()
    for text, wanted in cases("token_normalizer"):
        assert normalizer.normalize_str(text) == wanted, repr(text)


def test_the_release_layout_has_exactly_the_published_number_of_ids(release: Tokenizer):
    token_map = compressed_token_map(release)
    assert token_map.dtype == np.int32 and token_map.shape == (129280,)
    assert len(np.unique(token_map)) == int(token_map.max()) + 1 == 99092
    check_compressed_map(token_map, config_of(99092))
    new = np.maximum.accumulate(token_map)
    assert np.all(np.diff(new) <= 1) and token_map[0] == 0  # numbered by first appearance


def config_of(count: int) -> ModelConfig:
    return cast(ModelConfig, SimpleNamespace(engram_compressed_vocab_size=count))


def test_case_accents_and_spaces_share_ids_and_cut_bytes_do_not(tiny: Tokenizer):
    token_map = compressed_token_map(tiny)
    byte = {b: token_map[3 + b] for b in range(256)}
    assert byte[ord("a")] == byte[ord("A")] != byte[ord("b")]
    assert byte[ord(" ")] == byte[ord("\n")] == byte[ord("\t")]
    assert byte[0xC3] != byte[0xC4]
    assert int(token_map.max()) + 1 == 252


def test_padding_rows_share_one_id_of_their_own():
    config = cast(
        ModelConfig,
        SimpleNamespace(vocab_size=300, bos_token_id=0, eos_token_id=1, pad_token_id=2),
    )
    padded = Tokenizer(tiny_tokenizer.dumps(tiny_tokenizer.build()), config, "t.json")
    token_map = compressed_token_map(padded)
    assert token_map.shape == (300,)
    assert set(token_map[281:]) == {252} and token_map[:281].max() == 251


def test_a_map_of_another_size_than_the_configs_is_refused(tiny: Tokenizer):
    token_map = compressed_token_map(tiny)
    with pytest.raises(CheckpointError, match="gives 252 compressed ids, but .* is 99092"):
        check_compressed_map(token_map, config_of(99092))
