import copy
import dataclasses
import json
import tomllib

import pytest

from deepinfer_jax.config import ModelConfig, RopeScaling
from deepinfer_jax.errors import ConfigError
from deepinfer_jax.model.cache import kv_bytes_per_token, record_bytes
from deepinfer_jax.model.records import ROUNDED
from deepinfer_jax.settings import package_folder

RELEASE = package_folder("configs") / "v41_flash.toml"


@pytest.fixture(scope="module")
def release():
    return tomllib.loads(RELEASE.read_text())["model"]


@pytest.fixture
def nested(golden):
    """The small config as the release nests it."""
    return json.loads((golden / "config.json").read_text())


@pytest.fixture
def flat(nested):
    outer = {k: v for k, v in copy.deepcopy(nested).items() if k != "text_config"}
    return nested["text_config"] | outer


def refusal(raw, **options):
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(raw, **options)
    assert all((caught.value.what, caught.value.why, caught.value.do))
    return str(caught.value)


def test_the_release_has_40_layers_in_18_runs_with_the_published_sources(release):
    config = ModelConfig.from_dict(release)
    assert len(config.layers) == 40
    assert [len(run) for run in config.runs] == [
        1,
        1,
        1,
        5,
        1,
        5,
        1,
        5,
        1,
        3,
        1,
        3,
        1,
        3,
        1,
        3,
        1,
        3,
    ]
    owners = [plan.layer for plan in config.layers if plan.owns_kv]
    indexed = [plan.layer for plan in config.layers if plan.owns_index]
    assert (owners, indexed) == ([2, 8, 14, 20], [2, 8, 14, 20, 24, 28, 32, 36])
    assert [p.layer for p in config.layers if p.writes_candidates] == [20]
    assert [p.layer for p in config.layers if p.uses_candidates] == [24, 28, 32, 36]
    assert [p.layer for p in config.layers if p.engram is not None] == [1, 14]
    assert [p.layer for p in config.layers if p.tap] == [37, 38, 39]
    assert {p.kv_source for p in config.layers[21:]} == {20}
    assert all(p.kv_source is None and p.index_source is None for p in config.layers[:2])


def test_the_release_stores_records_of_528_288_and_68_bytes_and_890_bytes_a_token(release):
    config = ModelConfig.from_dict(release)
    assert record_bytes(config) == {"window": 528, "entry": 288, "index_key": 68}
    assert kv_bytes_per_token(config) == 890
    numbers = ROUNDED["bf16"], ROUNDED["f32"]
    assert [kv_bytes_per_token(config, caches) for caches in numbers] == [3200, 6400]


def test_nested_and_flat_keys_are_the_same_network(nested, flat):
    config = ModelConfig.from_dict(nested)
    assert ModelConfig.from_dict(flat) == config
    assert hash(ModelConfig.from_dict(flat)) == hash(config)
    assert config.digest_dict()["vision"]["hidden_size"] == 64


def test_rope_parameters_may_replace_rope_scaling(flat):
    config = ModelConfig.from_dict(flat)
    assert config.rope_scaling == RopeScaling(4, 32, 1, 128)
    flat["rope_parameters"] = flat.pop("rope_scaling")
    assert ModelConfig.from_dict(flat) == config
    for unscaled in (None, {"rope_type": "default"}):
        flat["rope_parameters"] = unscaled
        assert ModelConfig.from_dict(flat).rope_scaling is None


def test_rope_scaling_of_another_kind_or_without_its_numbers_is_refused(flat):
    other = flat | {"rope_scaling": {"rope_type": "linear", "factor": 2}}
    assert "rope_scaling has type 'linear'; only 'yarn' is implemented." in refusal(other)
    short = flat | {"rope_scaling": {"type": "yarn", "factor": 2, "beta_slow": 1}}
    message = refusal(short)
    assert "of type 'yarn' lacks beta_fast, original_max_position_embeddings." in message
    assert "rope_scaling of type 'yarn' lacks factor, " in refusal(flat | {"rope_scaling": {}})
    idle = flat | {"rope_scaling": {"rope_type": "default", "factor": 4}}
    assert "rope_scaling of type 'default' has factor." in refusal(idle)


def test_two_rope_tables_must_be_one_and_repeat_nothing_differently(flat):
    config = ModelConfig.from_dict(flat)
    same = flat["rope_scaling"] | {"rope_theta": 10000, "type": "yarn"}
    assert ModelConfig.from_dict(flat | {"rope_parameters": same}) == config
    message = refusal(flat | {"rope_parameters": {"rope_type": "default"}})
    assert "has both rope_scaling and rope_parameters, and they differ." in message
    for key, value, wanted in (("rope_theta", 5, 10000), ("type", "linear", "'yarn'")):
        message = refusal(flat | {"rope_scaling": same | {key: value}})
        assert f"rope_scaling.{key} is {value!r}, and elsewhere the same is {wanted}." in message


def test_another_family_and_another_network_are_refused(flat):
    message = refusal(flat | {"model_type": "deepseek_v3"})
    assert message == (
        "The model type is 'deepseek_v3', not 'deepseek_v41'. This engine runs one family, "
        "DeepSeek-V4.1, exactly. Point it at a DeepSeek-V4.1 checkpoint."
    )
    inner = {"text_config": {"model_type": "deepseek_v3_text"}}
    assert "The model type is 'deepseek_v3_text'" in refusal(flat | inner)
    del flat["model_type"]
    assert "The model type is None" in refusal(flat)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("tie_word_embeddings", True),
        ("num_key_value_heads", 8),
        ("topk_method", "greedy"),
        ("scoring_func", "sigmoid"),
        ("norm_topk_prob", False),
        ("architectures", ["LlamaForCausalLM"]),
        ("dtype", "float16"),
        ("torch_dtype", "float32"),
        ("quantization_config.quant_method", "awq"),
        ("quantization_config.activation_scheme", "static"),
        ("quantization_config.weight_block_size", [128, 128]),
        ("quantization_config.scale_fmt", "float32"),
        ("quantization_config.expert_dtype", "nvfp4"),
        ("rope_scaling.attention_factor", 1.2),
        ("rope_scaling.mscale", 1.0),
        ("rope_scaling.mscale_all_dim", 1.0),
        ("rope_scaling.truncate", False),
        ("vision_config.model_type", "siglip"),
    ],
)
def test_a_value_that_would_be_another_network_is_refused(flat, key, value):
    table, dot, name = key.rpartition(".")
    changes = {table: flat[table] | {name: value}} if dot else {key: value}
    for allow_unknown in (False, True):
        message = refusal(flat | changes, allow_unknown=allow_unknown)
        assert f"The model config sets {key} to {value!r}; only" in message
        assert "is implemented." in message


def test_rope_numbers_that_change_nothing_are_accepted(flat):
    idle = {"attention_factor": 1.0, "mscale": 0, "mscale_all_dim": 0.0, "truncate": True}
    changed = flat | {"rope_scaling": flat["rope_scaling"] | idle}
    assert ModelConfig.from_dict(changed) == ModelConfig.from_dict(flat)


@pytest.mark.parametrize("table", ["rope_scaling", "vision_config", "quantization_config"])
def test_an_unknown_key_of_a_nested_table_is_refused_unless_allowed(flat, table):
    changed = flat | {table: flat[table] | {"new_number": 3}}
    assert f"has 1 unknown keys: {table}.new_number." in refusal(changed)
    config = ModelConfig.from_dict(changed, allow_unknown=True)
    assert config == ModelConfig.from_dict(flat)


def test_a_misspelt_nested_key_meets_the_nearest(flat):
    changed = flat | {"vision_config": flat["vision_config"] | {"patch_sice": 14}}
    assert "(nearest: vision_config.patch_size)" in refusal(changed)


def test_an_unknown_key_is_refused_with_the_nearest_unless_allowed(nested):
    config = ModelConfig.from_dict(nested)
    nested["text_config"]["hiden_size"] = 64
    message = refusal(nested)
    assert "has 1 unknown keys: hiden_size." in message and "(nearest: hidden_size)" in message
    assert ModelConfig.from_dict(nested, allow_unknown=True) == config
    nested["text_config"]["qqqqqqqq"] = nested["text_config"].pop("hiden_size")
    assert "(nearest: a key of the release)" in refusal(nested)
    assert "has 2 unknown keys: qqqqqqqq, vision." in refusal(nested | {"vision": {}})


def test_every_required_key_is_missed_by_name(flat):
    flat.pop("vision_config")
    optional = (
        "architectures dtype quantization_config hidden_act attention_bias attention_dropout "
        "initializer_range use_cache tie_word_embeddings num_key_value_heads topk_method "
        "scoring_func norm_topk_prob rope_scaling image_token_id candidate_source_layer_id "
        "model_type dspark_n_routed_experts dspark_num_experts_per_tok"
    )
    for key in set(flat) - set(optional.split()):
        message = refusal({k: v for k, v in flat.items() if k != key})
        assert message.startswith(f"The model config lacks 1 keys: {key}. Every number"), key
    del flat["vocab_size"], flat["hc_eps"]
    assert "lacks 2 keys: hc_eps, vocab_size." in refusal(flat)


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("hidden_size", "128", "an integer"),
        ("hidden_size", 128.0, "an integer"),
        ("hidden_size", True, "an integer"),
        ("hidden_size", None, "an integer"),
        ("hidden_size", [128], "an integer"),
        ("swiglu_limit", "10", "a number"),
        ("swiglu_limit", False, "a number"),
        ("compress_ratios", 2, "a list of integers"),
        ("compress_ratios", "0022", "a list of integers"),
        ("compress_ratios", [0, 0, 2, 2, 2, 2, 1, 1, 1, 1.0], "a list of integers"),
        ("engram_layer_ids", [True, 4], "a list of integers"),
        ("candidate_source_layer_id", "6", "an integer or null"),
        ("image_token_id", 1.5, "an integer or null"),
    ],
)
def test_a_value_of_another_type_is_refused_and_never_converted(flat, key, value, wanted):
    message = refusal(flat | {key: value})
    shown = tuple(value) if isinstance(value, list) else value
    assert message == (
        f"The model config sets {key} to {shown!r}, of type {type(shown).__name__}. "
        f"It must be {wanted}; nothing is converted. Correct {key} in config.json."
    )


def test_an_integer_serves_where_a_number_is_wanted(flat):
    assert ModelConfig.from_dict(flat | {"swiglu_limit": 10, "hc_eps": 0}).swiglu_limit == 10


def test_numbers_of_nested_tables_have_their_types_too(flat):
    scaling = flat["rope_scaling"] | {"factor": "4"}
    message = refusal(flat | {"rope_scaling": scaling})
    assert "sets rope_scaling.factor to '4', of type str. It must be a number" in message
    vision = flat["vision_config"] | {"hidden_size": None}
    message = refusal(flat | {"vision_config": vision})
    assert "sets vision_config.hidden_size to None, of type NoneType. It must be an" in message
    del vision["patch_size"], vision["hidden_size"]
    message = refusal(flat | {"vision_config": vision})
    assert "vision_config lacks 2 keys: hidden_size, patch_size." in message


@pytest.mark.parametrize(
    "key", ["text_config", "rope_scaling", "vision_config", "quantization_config"]
)
def test_a_list_in_place_of_a_table_is_refused(flat, key):
    message = refusal(flat | {key: ["a"]})
    assert f"{key} is ['a'], of type list." in message


def test_a_config_that_is_no_table_is_refused():
    assert "The model config is [1], of type list." in refusal([1])


def test_a_key_with_two_values_is_refused(nested):
    nested["hidden_size"] = 64
    message = refusal(nested)
    assert "sets hidden_size to 64 on the top level and to 128 in text_config." in message
    del nested["hidden_size"]
    nested["hidden_act"] = "gelu"
    assert "sets hidden_act to 'gelu' on the top level and to 'silu'" in refusal(nested)


def places(nested, flat):
    """A config as a whole, and its table of text keys."""
    return (nested, nested["text_config"]), (flat, flat), (nested, nested)


NATIVE, FIELD = "dspark_n_activated_experts", "dspark_num_experts_per_tok"


@pytest.mark.parametrize("place", range(3))
def test_the_native_spelling_of_a_drafter_s_experts_is_read_wherever_it_stands(nested, flat, place):
    whole, table = places(nested, flat)[place]
    wanted = ModelConfig.from_dict(copy.deepcopy(whole))
    nested["text_config"].pop(FIELD)
    flat.pop(FIELD)
    fewer = ModelConfig.from_dict(copy.deepcopy(whole) | {FIELD: 1})
    table[NATIVE] = 1
    assert ModelConfig.from_dict(whole) == fewer != wanted
    table[NATIVE] = 0  # as many as a layer's
    assert ModelConfig.from_dict(whole).dspark_num_experts_per_tok == wanted.num_experts_per_tok


@pytest.mark.parametrize("place", range(3))
def test_two_spellings_of_one_number_are_refused_unless_they_agree(nested, flat, place):
    whole, table = places(nested, flat)[place]
    wanted = ModelConfig.from_dict(copy.deepcopy(whole))
    table[NATIVE] = wanted.dspark_num_experts_per_tok
    assert ModelConfig.from_dict(whole) == wanted
    table[NATIVE] += 1
    assert refusal(whole) == (
        f"The model config sets {NATIVE} to 3 and {FIELD} to 2. They are two spellings of one "
        "number, and the network differs. Remove one of them, or make both equal."
    )


SIZES = sorted(
    field.name
    for field in dataclasses.fields(ModelConfig)
    if field.type in ("int", "float", int, float)
    and not field.name.endswith(("_token_id", "_eps"))
    and field.name not in ("num_nextn_predict_layers", "n_shared_experts")
    and field.default != 0  # where 0 has a meaning
)


@pytest.mark.parametrize("key", SIZES)
@pytest.mark.parametrize("value", [0, -1])
def test_a_size_that_is_not_positive_is_refused(flat, key, value):
    assert refusal(flat | {key: value}) == (
        f"The model config has 1 sizes that are not positive numbers: {key} {value}. Nothing can "
        "be built from a width, a count or a factor of zero or less. Correct config.json."
    )


def test_the_sizes_checked_include_those_that_are_divided_by():
    assert {"o_groups", "head_dim", "hc_mult", "candidate_block_size", "gate_temp"} <= set(SIZES)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_size_that_is_no_finite_number_is_refused(flat, value):
    assert f"not positive numbers: swiglu_limit {value}." in refusal(flat | {"swiglu_limit": value})


def test_sizes_of_nested_tables_and_lists_are_positive_too(flat):
    changes = {
        "rope_scaling": flat["rope_scaling"] | {"factor": 0},
        "vision_config": flat["vision_config"] | {"patch_size": -1},
        "engram_num_embeddings": [630, 0],
        "hc_eps": -1e-6,
    }
    message = refusal(flat | changes)
    assert "has 4 sizes" in message
    for words in (
        "rope_scaling.factor 0",
        "vision_config.patch_size -1",
        "engram_num_embeddings 0",
        "hc_eps -1e-06",
    ):
        assert words in message


@pytest.mark.parametrize("key", ["n_routed_experts", "num_experts_per_tok"])
def test_a_draft_stage_has_the_experts_of_a_layer_where_it_has_none_of_its_own(flat, key):
    own = f"dspark_{key}"
    assert getattr(ModelConfig.from_dict(flat).of_stages, key) == flat[own] != flat[key]
    absent = {k: v for k, v in flat.items() if k != own}
    for raw in (flat | {own: 0}, absent):
        config = ModelConfig.from_dict(raw)
        assert getattr(config, own) == getattr(config.of_stages, key) == flat[key]
    assert f"{own} -1." in refusal(flat | {own: -1})


def test_a_network_without_a_drafter_needs_no_sizes_of_one(flat):
    names = {k: 0 for k in flat if k.startswith("dspark_") and isinstance(flat[k], int)}
    plain = names | {
        "num_nextn_predict_layers": 0,
        "dspark_target_layer_ids": [],
        "compress_ratios": flat["compress_ratios"][:10],
    }
    assert ModelConfig.from_dict(flat | plain).num_nextn_predict_layers == 0
    assert "num_nextn_predict_layers -1" in refusal(flat | plain | {"num_nextn_predict_layers": -1})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"compress_ratios": [0, 0, 2]}, "compress_ratios has 3 entries for 10 + 3 layers"),
        ({"compress_ratios": [0, 0, 4, 2, 2, 2, 1, 1, 1, 1]}, "a ratio other than 0, 1, 2"),
        (
            {"compress_ratios": [1, 0, 2, 2, 2, 2, 1, 1, 1, 1]},
            "layer 0 is compressed but has no kv",
        ),
        ({"compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1, 1, 1]}, "layer 5 and its kv source differ"),
        (
            {"index_source_layer_ids": [4, 6, 8]},
            "layer 2 is compressed but has no index source; "
            "layer 3 is compressed but has no index source; every kv source must be an index",
        ),
        ({"engram_num_embeddings": [630]}, "engram_num_embeddings differ in length"),
        ({"o_groups": 3}, "8 heads do not divide into 3 output groups"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 exceeds 8"),
        ({"n_shared_experts": 2}, "n_shared_experts is 2, the family has 1"),
        ({"qk_rope_head_dim": 15}, "qk_rope_head_dim 15 does not fit the heads"),
        ({"qk_rope_head_dim": 34}, "qk_rope_head_dim 34 does not fit the heads"),
        ({"kv_source_layer_ids": [2, 4, 10]}, "kv_source_layer_ids [2, 4, 10] are not ascending"),
        ({"index_source_layer_ids": [2, 6, 4, 8]}, "index_source_layer_ids [2, 6, 4, 8] are not"),
        ({"engram_layer_ids": [-1, 4]}, "engram_layer_ids [-1, 4] are not ascending layers below"),
        ({"dspark_target_layer_ids": [7, 7, 8]}, "dspark_target_layer_ids [7, 7, 8] are not"),
        ({"candidate_source_layer_id": 7}, "the candidate source 7 is no index source"),
        ({"candidate_source_layer_id": 99}, "the candidate source 99 is no index source"),
        (
            {"candidate_source_layer_id": 4},
            "layer 6 selects from kv source 6 inside candidate blocks of kv source 4; "
            "layer 8 selects from kv source 6",
        ),
        ({"index_source_layer_ids": [1, 2, 4, 6, 8]}, "index source 1 is not compressed"),
        ({"compress_ratios": [0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 0, 1, 0]}, "a layer of the drafter"),
        ({"bos_token_id": 512}, "bos_token_id 512 is no id below vocab_size 512"),
        ({"eos_token_id": -1}, "eos_token_id -1 is no id below"),
        ({"pad_token_id": 512}, "pad_token_id 512 is no id below"),
        ({"image_token_id": 600}, "image_token_id 600 is no id below"),
        ({"engram_pad_token_id": 512}, "engram_pad_token_id 512 is no id below"),
        ({"dspark_noise_token_id": 512}, "dspark_noise_token_id 512 is no id below"),
        ({"dspark_num_experts_per_tok": 7}, "dspark_num_experts_per_tok 7 exceeds 6"),
        ({"engram_max_ngram_size": 1}, "engram_max_ngram_size is 1, an n-gram has at least 2"),
        ({"head_dim": 8}, "qk_rope_head_dim 16 does not fit the heads"),
        ({"compress_rope_theta": 1}, "compress_rope_theta 1 is not above 1"),
    ],
)
def test_a_config_that_contradicts_itself_is_refused(flat, changes, words):
    message = refusal(flat | changes)
    assert message.startswith("The model config contradicts itself: ")
    assert words in message


def test_all_contradictions_are_told_at_once(flat):
    message = refusal(flat | {"o_groups": 3, "n_shared_experts": 0})
    assert "output groups; n_shared_experts is 0" in message


def test_parsing_leaves_the_callers_object_alone(nested):
    before = copy.deepcopy(nested)
    ModelConfig.from_dict(nested)
    assert nested == before


def test_a_missing_and_a_damaged_file_are_told_apart(tmp_path):
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_file(tmp_path)
    assert f"There is no model config at {tmp_path / 'config.json'}." in str(caught.value)
    (tmp_path / "config.json").write_text('{"a": 1,\n')
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_file(tmp_path / "config.json")
    assert "is not valid JSON (line 2: Expecting property name" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"\xff{}", "can't decode byte 0xff"), (b"9" * 5000, "4300 digits")],
    ids=["no UTF-8", "too long a number"],
)
def test_a_file_whose_bytes_cannot_be_json_is_refused(tmp_path, content, words):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_file(tmp_path)
    assert "is not valid JSON (" in caught.value.what
    assert words in caught.value.what


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_file(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path / 'config.json'} cannot be read (Is a directory). The network cannot be built "
        "without its config. Make it a readable file, or name another model folder."
    )
