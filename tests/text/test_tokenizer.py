"""Loading checks, split encoding, decoding, and the shipped tiny tokenizer."""

import copy
import json
import pickle
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text import tiny_tokenizer
from text.chat_cases import cases

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import CheckpointError, RequestError
from deepinfer_jax.text import spellings
from deepinfer_jax.text.tokenizer import Piece, Tokenizer

BOS = Piece(spellings.BOS, True)
USER = Piece(spellings.USER, True)


def config_of(**changes: Any) -> ModelConfig:
    """The four fields of a config that a tokenizer is checked against."""
    values = {"vocab_size": 281, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    return cast(ModelConfig, SimpleNamespace(**values | changes))


def load(spec: dict[str, Any], config: ModelConfig | None = None) -> Tokenizer:
    return Tokenizer(tiny_tokenizer.dumps(spec), config, "t.json")


def test_the_shipped_file_is_what_its_recipe_builds():
    shipped = files("deepinfer_jax") / "models" / "tiny_tokenizer" / "tokenizer.json"
    assert shipped.read_bytes() == tiny_tokenizer.dumps(tiny_tokenizer.build())


def test_the_tiny_tokenizer_splits_text_as_the_release_does(release_file: Path):
    theirs, ours = json.loads(release_file.read_text()), tiny_tokenizer.build()
    assert ours["pre_tokenizer"] == theirs["pre_tokenizer"]
    assert ours["decoder"] == theirs["decoder"]
    shared = {t["content"] for t in ours["added_tokens"]}
    assert shared <= {t["content"] for t in theirs["added_tokens"]}


def test_the_tiny_tokenizer_has_one_token_per_byte(tiny: Tokenizer):
    assert tiny.vocab_size == 281
    assert tiny.encode("aé", add_bos=False) == [3 + b for b in "aé".encode()]
    assert [tiny.token_bytes(3 + b) for b in range(256)] == [bytes([b]) for b in range(256)]


def test_the_release_layout_has_the_published_ids(release: Tokenizer):
    wanted = {
        spellings.BOS: 0,
        spellings.EOS: 1,
        spellings.PAD: 2,
        spellings.SYSTEM: 128799,
        spellings.USER: 128803,
        spellings.ASSISTANT: 128804,
        spellings.THINK: 128821,
        spellings.THINK_END: 128822,
        spellings.DSML: 128825,
        spellings.REMINDER: 128828,
        spellings.TASKS["read_url"]: 128845,
        spellings.IMAGE: 129264,
    }
    assert {s: release.special(s) for s in wanted} == wanted
    assert release.vocab_size == 129280


def test_a_joined_run_of_plain_pieces_is_encoded_as_one_text(release: Tokenizer):
    whole = release.encode("hello world", add_bos=False)
    assert release.encode_pieces([Piece("hel"), Piece("lo world")]) == whole
    apart = release.encode_pieces([Piece("hel"), USER, Piece("lo world")])
    assert [i for i in apart if i != 128803] != whole


def test_a_batch_equals_its_members(tiny: Tokenizer):
    rows = [[BOS, Piece("a")], [], [Piece("b"), USER, Piece("a")], [BOS, Piece("a")]]
    assert tiny.encode_pieces_batch(rows) == [tiny.encode_pieces(row) for row in rows]


def test_long_spans_are_encoded_once_and_the_cache_is_bounded(
    release: Tokenizer, monkeypatch: pytest.MonkeyPatch
):
    seen: list[str] = []
    encode = release._encode_plain
    monkeypatch.setattr(release, "_encode_plain", lambda texts: seen.extend(texts) or encode(texts))
    monkeypatch.setattr("deepinfer_jax.text.tokenizer._CACHE_CHARACTERS", 2000)
    texts = [f"{n} " + "word " * 150 for n in range(4)]
    first = [release.encode(text) for text in texts]
    assert [release.encode(text) for text in texts[2:]] == first[2:]
    assert seen == texts
    assert release.encode(texts[0]) == first[0]
    assert seen == [*texts, texts[0]]


def test_plain_text_gets_one_bos(tiny: Tokenizer):
    assert tiny.encode("x") == [0, 3 + ord("x")]
    assert tiny.encode(spellings.BOS + "x") == [0, 3 + ord("x")]
    spelled = tiny.encode(spellings.BOS, add_bos=False)
    assert tiny.encode(spellings.BOS * 2) == [0, *spelled]
    assert 0 not in spelled


@given(st.text())
def test_decoding_gives_the_text_back(tiny: Tokenizer, text: str):
    assert tiny.decode(tiny.encode(text, add_bos=False)) == text


def test_decoding_shows_special_tokens_and_cut_characters(release: Tokenizer):
    ids = release.encode_pieces([BOS, Piece("héllo 👋🏽"), USER])
    assert release.decode(ids) == f"{spellings.BOS}héllo 👋🏽{spellings.USER}"
    tiny_ids = [i for i in range(release.vocab_size) if release.token_bytes(i) == b"\xf0"]
    assert release.decode(tiny_ids) == "\ufffd"


def test_padding_rows_of_the_network_have_no_text(tiny: Tokenizer):
    padded = load(tiny_tokenizer.build(), config_of(vocab_size=300))
    assert (padded.vocab_size, padded.network_vocab_size) == (281, 300)
    assert padded.decode([3 + ord("a"), 299]) == "a"
    for tokenizer, wrong in ((padded, 300), (tiny, 281), (tiny, -1)):
        with pytest.raises(RequestError, match=f"Token id {wrong} is outside the vocabulary 0"):
            tokenizer.token_bytes(wrong)


def test_the_digest_is_that_of_the_file(tiny: Tokenizer):
    spec = tiny_tokenizer.build()
    assert load(spec).digest == tiny.digest
    spec["model"]["vocab"] = dict(reversed(spec["model"]["vocab"].items()))
    assert load(spec).digest != tiny.digest


def test_golden_prompts_have_the_recorded_ids(release: Tokenizer):
    rendered = {c["name"]: c["expected"] for c in cases("render_chat_completions")}
    wanted = [c for c in cases("encode_ids") if c["protocol"] == "chat_completions"]
    batch = []
    for case in wanted:
        prompt, at, pieces = rendered[case["name"]]["prompt"], 0, []
        for begin, end in rendered[case["name"]]["special_ranges"]:
            pieces += [Piece(prompt[at:begin]), Piece(prompt[begin:end], True)]
            at = end
        batch.append([*pieces, Piece(prompt[at:])])
    assert len(wanted) == 60
    assert release.encode_pieces_batch(batch) == [c["ids"] for c in wanted]


def test_text_with_an_unpaired_surrogate_is_refused_with_its_place(tiny: Tokenizer):
    with pytest.raises(RequestError, match="unpaired surrogate at character 2 of 3"):
        tiny.encode("ab\ud800")


def test_an_unknown_special_piece_is_refused_by_spelling(tiny: Tokenizer):
    with pytest.raises(CheckpointError, match="has no special token spelled '<｜fim▁hole｜>'"):
        tiny.encode_pieces([Piece("<｜fim▁hole｜>", True)])


def test_a_missing_file_is_refused_by_path(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"no tokenizer at .*tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


NO_TRIM = tiny_tokenizer.dumps(tiny_tokenizer.build()).replace(b'"trim_offsets":true,', b"")


@pytest.mark.parametrize(
    "data", [b"", b"\xff", b"[1]", b'{"model": {}}', b'{"added_tokens": []}', NO_TRIM]
)
def test_a_damaged_file_is_refused(tmp_path: Path, data: bytes):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="is not a tokenizer file"):
        Tokenizer.from_file(path)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("model.type", {"model": {"type": "Unigram"}}),
        ("model.unk_token", {"model": {"unk_token": "<unk>"}}),
        ("model.byte_fallback", {"model": {"byte_fallback": True}}),
        ("model.dropout", {"model": {"dropout": 0.1}}),
        ("model.ignore_merges", {"model": {"ignore_merges": True}}),
        ("model.continuing_subword_prefix", {"model": {"continuing_subword_prefix": "##"}}),
        ("model.end_of_word_suffix", {"model": {"end_of_word_suffix": "</w>"}}),
        ("truncation", {"truncation": {"max_length": 4}}),
        ("padding", {"padding": {"pad_id": 0}}),
        ("normalizer", {"normalizer": {"type": "NFC"}}),
        ("post_processor", {"post_processor": {"type": "TemplateProcessing"}}),
        ("decoder", {"decoder": {"type": "Metaspace"}}),
        ("decoder", {"decoder": None}),
        ("pre_tokenizer", {"pre_tokenizer": {"type": "Metaspace"}}),
        ("pre_tokenizer", {"pre_tokenizer": None}),
        ("pre_tokenizer", {"pre_tokenizer": {"type": "Digits"}}),
        ("pre_tokenizer", {"pre_tokenizer": {"type": "Sequence", "pretokenizers": []}}),
        (
            "pre_tokenizer.add_prefix_space",
            {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True}},
        ),
    ],
)
def test_a_setting_that_breaks_split_encoding_is_refused_by_field(
    field: str, change: dict[str, Any]
):
    spec = tiny_tokenizer.build()
    for key, value in change.items():
        spec[key] = spec[key] | value if key == "model" else value
    with pytest.raises(CheckpointError) as caught:
        load(spec)
    assert f"t.json sets {field} to " in str(caught.value)
    assert "one by one between special tokens" in str(caught.value)


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word"])
def test_an_added_token_that_swallows_its_surroundings_is_refused(flag: str):
    spec = tiny_tokenizer.build()
    spec["added_tokens"][4][flag] = True
    spelling = spec["added_tokens"][4]["content"]
    with pytest.raises(CheckpointError) as caught:
        load(spec)
    assert f"added_tokens['{spelling}'].{flag}" in str(caught.value)


@pytest.mark.parametrize("spelling", spellings.RENDERED)
def test_a_missing_spelling_is_refused_by_name(spelling: str):
    spec = tiny_tokenizer.build()
    for token in spec["added_tokens"]:
        if token["content"] == spelling:
            token["content"] = "<｜other｜>"
    with pytest.raises(CheckpointError, match="lacks 1 special tokens in added_tokens") as caught:
        load(spec)
    assert spelling in str(caught.value)


def test_a_missing_byte_is_refused():
    spec = tiny_tokenizer.build()
    vocab = spec["model"]["vocab"]
    vocab["zz"] = vocab.pop("A")
    with pytest.raises(CheckpointError, match=r"lacks 1 of the 256 byte tokens.*first: byte 65"):
        load(spec)


def test_a_hole_in_the_ids_is_refused():
    spec = tiny_tokenizer.build()
    spec["added_tokens"][-1]["id"] = 290
    with pytest.raises(CheckpointError, match="281 ids up to 290; id 280 is missing"):
        load(spec)


def test_more_ids_than_the_network_has_are_refused():
    with pytest.raises(CheckpointError, match="ids up to 280, but vocab_size is 280"):
        load(tiny_tokenizer.build(), config_of(vocab_size=280))


@pytest.mark.parametrize("field", ["bos_token_id", "eos_token_id", "pad_token_id"])
def test_framing_ids_other_than_the_configs_are_refused_by_field(field: str):
    with pytest.raises(CheckpointError, match=f"The config's {field} is 7, but the tokenizer"):
        load(tiny_tokenizer.build(), config_of(**{field: 7}))


def test_a_tokenizer_whose_plain_text_reaches_an_added_id_is_refused():
    spec = copy.deepcopy(tiny_tokenizer.build())
    # "<think>" becomes reachable by merges, with the id of the special token.
    vocab, merges = spec["model"]["vocab"], spec["model"]["merges"]
    for token in spec["added_tokens"]:
        if token["content"] == spellings.THINK:
            vocab[spellings.THINK] = token["id"]
    parts = ["<t", "<th", "<thi", "<thin", "<think"]
    for n, part in enumerate(parts):
        vocab[part] = 281 + n
    merges += [["<", "t"], ["<t", "h"], ["<th", "i"], ["<thi", "n"], ["<thin", "k"]]
    merges += [["<think", ">"]]
    spec["pre_tokenizer"] = spec["pre_tokenizer"]["pretokenizers"][-1]
    with pytest.raises(CheckpointError, match="plain text '<think>' encodes to an id of"):
        load(spec)


def test_refusals_survive_pickling():
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.from_file("nowhere.json")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
