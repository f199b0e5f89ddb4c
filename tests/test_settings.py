import dataclasses
import json
from pathlib import Path

import pytest

from deepinfer_jax import settings
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.env import Env
from deepinfer_jax.errors import CheckpointError, ConfigError
from deepinfer_jax.model.cache import BACKTRACK
from deepinfer_jax.model.engram_hash import engram_hash
from deepinfer_jax.settings import EngineConfig, load
from deepinfer_jax.text.compressed_ids import compressed_token_map
from deepinfer_jax.text.tokenizer import Tokenizer


@pytest.fixture
def write(tmp_path):
    def write(text: str, name: str = "mine") -> Path:
        path = tmp_path / f"{name}.toml"
        path.write_text(text)
        return path

    return write


def source_of(resolved: settings.Settings, key: str) -> tuple[object, str]:
    found = [(value, source) for name, value, source in resolved.sources if name == key]
    assert len(found) == 1
    return found[0]


def test_without_a_file_every_field_has_its_default():
    resolved = load()
    assert resolved.engine == EngineConfig()
    assert {source for _, _, source in resolved.sources} == {"default"}
    assert {name for name, _, _ in resolved.sources} == {
        f"engine.{f.name}" for f in dataclasses.fields(EngineConfig) if f.name != "kernels"
    }


def test_the_release_s_config_is_the_published_network():
    network = load("v41_flash").model_config()
    assert len(network.runs) == 18
    assert len(network.layers) == 40
    assert (network.n_routed_experts, network.hidden_size) == (384, 5120)
    assert network.engram_num_embeddings == engram_hash(network).num_embeddings
    assert network.compress_ratios == (0,) * 2 + (2,) * 18 + (1,) * 20 + (0,) * 3
    assert network.vision is not None and network.vision.min_pixels == 544**2
    assert network.rope_scaling is not None
    assert network.rope_scaling.original_max_position_embeddings == 65536


def test_the_tiny_config_is_the_golden_network_on_the_byte_tokenizer(golden):
    tiny = load("tiny").model_config()
    reference = ModelConfig.from_file(golden / "config.json")
    differing = {
        f.name
        for f in dataclasses.fields(ModelConfig)
        if getattr(tiny, f.name) != getattr(reference, f.name)
    }
    assert differing == {
        "vocab_size",
        "engram_compressed_vocab_size",
        "image_token_id",
        "dspark_noise_token_id",
    }


def test_the_tiny_config_agrees_with_its_tokenizer():
    tiny = load("tiny").model_config()
    tokenizer = Tokenizer.from_folder(settings.package_folder("models") / "tiny_tokenizer", tiny)
    assert (tiny.bos_token_id, tiny.eos_token_id, tiny.pad_token_id) == (
        tokenizer.bos_id,
        tokenizer.eos_id,
        tokenizer.pad_id,
    )
    assert tiny.vocab_size % 32 == 0
    assert tiny.image_token_id == tokenizer.special("<｜deepseek_image｜>")
    assert tokenizer.vocab_size <= tiny.dspark_noise_token_id < tiny.vocab_size
    assert tiny.engram_compressed_vocab_size == compressed_token_map(tokenizer).max() + 1
    assert tiny.engram_num_embeddings == engram_hash(tiny).num_embeddings


def test_the_nano_config_is_the_packaged_model():
    resolved = load("nano")
    assert resolved.folder == settings.package_folder("models") / "nano"
    assert resolved.model_config().num_hidden_layers > 0


def test_every_packaged_config_loads():
    assert set(settings.config_names()) >= {"nano", "tiny", "v41_flash"}
    for name in settings.config_names():
        assert load(name).model_config().vocab_size > 0


def test_precedence_is_explicit_then_set_then_environment_then_file(write):
    path = write(
        """
        [engine]
        max_num_seqs = 2
        engram = "mmap"
        batch_invariant = false
        weights = "packed"
        """
    )
    env = Env(batch_invariant=True, engram="host", compile_cache_dir="/cache")
    resolved = load(
        path,
        ["engine.engram=device", "engine.max_num_seqs=3"],
        env=env,
        explicit={"max_num_seqs": 4},
    )
    assert source_of(resolved, "engine.max_num_seqs") == (4, "explicit")
    assert source_of(resolved, "engine.engram") == ("device", "--set")
    assert source_of(resolved, "engine.batch_invariant") == (True, "environment")
    assert source_of(resolved, "engine.weights") == ("packed", "file")
    assert source_of(resolved, "engine.sampler") == ("stable", "default")
    assert resolved.engine.compile_cache_dir == "/cache"


def test_backtracking_from_the_environment_is_at_least_a_step_s_rows():
    resolved = load(env=Env(max_backtracking_tokens=9))
    assert source_of(resolved, "engine.max_backtracking_tokens") == (9, "environment")
    assert [resolved.engine.backtracking(drafts) for drafts in (0, 5, 8, 9)] == [9, 9, 9, 10]
    assert EngineConfig().backtracking(0) == EngineConfig().backtracking(5) == BACKTRACK


def test_kernels_merge_op_by_op(write):
    path = write('[engine.kernels]\nlinear = "xla"\ntopk = "xla"\n')
    resolved = load(path, ["engine.kernels.topk=full_sort"], env=Env(kernels=(("mhc", "xla"),)))
    assert resolved.engine.kernels == (("linear", "xla"), ("mhc", "xla"), ("topk", "full_sort"))
    assert source_of(resolved, "engine.kernels.mhc") == ("xla", "environment")
    assert source_of(resolved, "engine.kernels.topk") == ("full_sort", "--set")


@pytest.mark.parametrize(
    "kernels", [(1, 2), (("linear",),), ((1, "xla"),), "linear", (("mhc", "a"), ("mhc", "b"))]
)
def test_kernels_that_are_no_pairs_of_op_and_name_are_refused(kernels):
    with pytest.raises(ConfigError) as caught:
        load(explicit={"kernels": kernels})
    assert caught.value.what == (
        f"engine.kernels is {kernels!r} (explicit), which is not a table of op = kernel name."
    )


def test_kernels_may_be_given_as_a_config_holds_them():
    kernels = (("linear", "xla"), ("mhc", "xla"))
    assert load(explicit={"kernels": kernels}).engine.kernels == kernels
    assert load(explicit={"kernels": dict(kernels)}).engine.kernels == kernels


def test_a_model_folder_from_the_environment_replaces_the_file_s_network(tmp_path, golden):
    (tmp_path / "config.json").write_bytes((golden / "config.json").read_bytes())
    resolved = load("tiny", env=Env(hf_model_dir=str(tmp_path)))
    assert resolved.folder == tmp_path
    assert resolved.network is None
    assert resolved.model_config().vocab_size == 512


def test_a_model_that_does_not_exist_is_refused_with_the_packaged_names():
    with pytest.raises(CheckpointError, match=r"no model 'nono'.*packaged models are: .*nano"):
        _ = load(explicit={"model": "nono"}).folder


@pytest.mark.parametrize("model", ["./nano", "nano/"])
def test_a_path_is_never_taken_for_a_packaged_name(tmp_path, monkeypatch, golden, model):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=f"no model '{model}'"):
        settings.model_folder(model)
    (tmp_path / "nano").mkdir()
    (tmp_path / "nano" / "config.json").write_bytes((golden / "config.json").read_bytes())
    assert settings.model_folder(model).resolve() == tmp_path / "nano"
    assert settings.model_folder("nano") == settings.package_folder("models") / "nano"


def test_a_config_s_path_is_never_taken_for_a_packaged_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"no config './tiny'"):
        load("./tiny")
    (tmp_path / "tiny").write_text("[engine]\nmax_num_seqs = 3\n")
    assert load("./tiny").engine.max_num_seqs == 3
    assert load("tiny").engine.max_num_seqs == 8


def test_a_config_that_cannot_be_read_is_refused(write, monkeypatch):
    def denied(*args, **options):
        raise PermissionError(13, "Permission denied")

    path = write("")
    monkeypatch.setattr(Path, "read_text", denied)
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert str(caught.value) == (
        f"{path} cannot be read (Permission denied). A config that is left out would configure "
        "another engine. Make it readable, or name another config."
    )


def test_a_config_extends_another_by_one_level(write):
    write(
        '[engine]\nmax_num_seqs = 2\nmax_num_batched_tokens = 32\n[engine.kernels]\nmhc = "xla"\n',
        "base",
    )
    child = write(
        'extends = "base"\n[engine]\nmax_num_seqs = 5\n[engine.kernels]\ntopk = "xla"\n', "child"
    )
    engine = load(child).engine
    assert (engine.max_num_seqs, engine.max_num_batched_tokens) == (5, 32)
    assert engine.kernels == (("mhc", "xla"), ("topk", "xla"))
    grandchild = write('extends = "child"\n', "grandchild")
    with pytest.raises(ConfigError, match="extends child, which extends base"):
        load(grandchild)


def test_a_config_can_change_the_network_that_it_extends(write):
    child = write('extends = "tiny"\n[model]\nindex_topk = 8\n')
    resolved = load(child)
    assert resolved.model_config().index_topk == 8
    assert resolved.model_config().hidden_size == 128
    assert resolved.engine.model == "mine"


def test_a_config_that_extends_a_network_may_run_a_model_instead(write):
    child = write('extends = "tiny"\n[engine]\nmodel = "nano"\n')
    assert load(child).network is None


def test_a_config_with_a_model_and_a_network_is_refused(write):
    with pytest.raises(ConfigError, match="either could be meant"):
        load(write('[engine]\nmodel = "nano"\n[model]\nvocab_size = 3\n'))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[engine]\nmax_num_seq = 2\n", "no config key engine.max_num_seq.*max_num_seqs"),
        ("[engin]\n", "no config key engin.*Did you mean engine"),
        ("engine = 3\n", "engine is 3 .file., which is not a table"),
        ("extends = 3\n", "extends is 3 .file., which is not a config's name"),
        ("[engine]\nmax_num_seqs = 0\n", "max_num_seqs is 0 .file., which is not a positive"),
        ("[engine]\nmax_num_seqs = true\n", "which is not a positive integer"),
        ("[engine]\nbatch_invariant = 1\n", "which is not true or false"),
        ('[engine]\nsampler = "best"\n', "one of stable, original"),
        ("[engine]\nmodel = 3\n", "a text that is not empty"),
        ("[engine]\nkernels = 3\n", "a table of op = kernel name"),
        ("[engine.kernels]\nlinear = 3\n", "a kernel's name"),
        ("[engine\n", "is not valid TOML"),
        ("[model]\nallow_unknown = 3\n", "model.allow_unknown is 3"),
    ],
)
def test_an_illegal_file_is_refused(write, text, message):
    with pytest.raises(ConfigError, match=message):
        load(write(text))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("engine.kernels=5", "engine.kernels is 5 .--set., which is not a table of op"),
        ("model.allow_unknown=3", "model.allow_unknown is 3 .--set., which is not true or"),
        ("engine.max_num_seqs=3\nbatch_invariant=true", "max_num_seqs is '3.nbatch_inv"),
        ("engine.max_num_seqs", "not of the form table.key=value"),
        ("max_num_seqs=3", "not of the form table.key=value"),
        ("engines.max_num_seqs=3", "Did you mean engine"),
        ("engine.max_nm_seqs=3", "Did you mean engine.max_num_seqs"),
        ("engine.batch_invariant=yes", "'yes' .--set., which is not true or false"),
        ("engine.max_backtracking_tokens=-1", "is -1 .--set., which is not an integer that is not"),
        ("model.hidden_size=wide", "model.hidden_size is 'wide' .--set., .* type of 128"),
        ("model.hidden_size=1.5", "model.hidden_size is 1.5"),
        ("model.hiden_size=64", "nearest: hidden_size"),
        ("model.rope_scaling=3", "model.rope_scaling is 3"),
    ],
)
def test_an_illegal_override_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        load("tiny", [text])


def test_an_override_reaches_into_a_table_of_the_network():
    resolved = load("tiny", ["model.rope_scaling.factor=2", "model.index_topk=8"])
    network = resolved.model_config()
    assert network.rope_scaling is not None and network.rope_scaling.factor == 2
    assert network.index_topk == 8
    assert source_of(resolved, "model.index_topk") == (8, "--set")


def test_the_numbers_of_a_stored_model_cannot_be_overridden():
    with pytest.raises(ConfigError, match="belong to its weights"):
        load("nano", ["model.index_topk=8"])


def test_unknown_keys_of_a_stored_model_are_allowed_on_request_only(tmp_path, golden):
    raw = json.loads((golden / "config.json").read_text()) | {"new_key": 1}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    explicit = {"model": tmp_path}
    with pytest.raises(ConfigError, match="new_key"):
        load(explicit=explicit).model_config()
    allowed = load(None, ["model.allow_unknown=true"], explicit=explicit)
    assert allowed.model_config().vocab_size == 512
    assert source_of(allowed, "model.allow_unknown") == (True, "--set")


def test_an_unknown_config_name_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match=r"no config 'v41-flash'.*Did you mean v41_flash"):
        load("v41-flash")


def test_auto_leaves_the_choice_to_the_engine():
    names = "arithmetic", "max_model_len", "cache_format"
    engine = load(None, [f"engine.{name}=auto" for name in names]).engine
    assert [getattr(engine, name) for name in names] == [None] * 3
    assert engine.arithmetic_on("cpu") == "f32"
    assert engine.arithmetic_on("sm90") == "release"
    assert EngineConfig(arithmetic="f32qdq").arithmetic_on("sm90") == "f32qdq"


def test_the_digest_is_of_the_resolved_values(write):
    path = write(
        'extends = "tiny"\n[engine]\nmodel = "nano"\nmax_num_seqs = 7\n'
        "max_num_batched_tokens = 512\n"
    )
    by_file = load(path)
    by_line = load("nano", ["engine.max_num_seqs=7"])
    assert by_file.digest() == by_line.digest()
    assert len(by_file.digest()) == 64
    assert load("nano", ["engine.max_num_seqs=8"]).digest() != by_line.digest()
    assert load("tiny", ["model.index_topk=8"]).digest() != load("tiny").digest()
    for inert in ("compile_cache_dir=/c", "compile=all", "late_compile=error"):
        other = load("nano", ["engine.max_num_seqs=7", f"engine.{inert}"])
        assert other.engine != by_line.engine and other.digest() == by_line.digest()


def test_the_digest_does_not_tell_where_the_model_lies(tmp_path, golden):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_bytes((golden / "config.json").read_bytes())
    digests = {load(explicit={"model": tmp_path / name}).digest() for name in ("a", "b")}
    assert len(digests) == 1
    assert digests != {load("nano").digest()}


def test_canonical_json_is_plain_json_with_sorted_keys():
    text = load("v41_flash").canonical_json()
    content = json.loads(text)
    assert json.dumps(content, sort_keys=True, separators=(",", ":")) == text
    assert content["model"]["vocab_size"] == 129280


def test_an_engine_config_is_hashable():
    assert hash(load("tiny").engine) == hash(load("tiny").engine)
