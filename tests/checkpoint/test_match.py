import dataclasses

import ml_dtypes
import numpy as np
import pytest

from deepinfer_jax.checkpoint.match import match
from deepinfer_jax.checkpoint.safetensors import write_safetensors
from deepinfer_jax.checkpoint.shards import open_checkpoint
from deepinfer_jax.errors import CheckpointError, ConfigError

BF16 = ml_dtypes.bfloat16


@pytest.fixture
def check(tmp_path, config):
    """Write tensors, open them and match them."""

    def run(tensors, *, drafter=None, config=config):
        write_safetensors(tmp_path / "model.safetensors", tensors)
        return match(open_checkpoint(tmp_path), config, drafter=drafter)

    return run


def refusal(check, tensors, **options):
    with pytest.raises(CheckpointError) as caught:
        check(tensors, **options)
    assert caught.value.why and caught.value.do
    return caught.value.what


def without_drafter(tensors):
    return {name: x for name, x in tensors.items() if not name.startswith("mtp.")}


def test_the_golden_checkpoint_matches(check, release_tensors):
    matched = check(release_tensors)
    assert matched.spelling == "release"
    assert matched.drafter and matched.ignored == ()
    assert len(matched.specs) == 645


def test_every_missing_and_unexpected_name_is_listed(check, release_tensors):
    for name in ("norm.weight", "layers.3.ffn.experts.2.w1.scale"):
        del release_tensors[name]
    release_tensors["layers.0.hc_attn_norm.weight"] = np.zeros(128, BF16)
    release_tensors["lm_head.weight"] = np.zeros((512, 128), BF16)
    said = refusal(check, release_tensors)
    assert "2 missing: layers.3.ffn.experts.2.w1.scale, norm.weight;" in said
    assert "2 unexpected: layers.0.hc_attn_norm.weight, lm_head.weight." in said
    assert "(release spelling, 1052 tensors)" in said and "which needs 1052" in said


def test_a_wrong_shape_and_a_wrong_type_are_listed_with_both_values(check, release_tensors):
    release_tensors["head.weight"] = np.zeros((511, 128), BF16)
    release_tensors["norm.weight"] = np.zeros(128, np.float32)
    sink = "layers.2.attn.attn_sink"
    release_tensors[sink] = release_tensors[sink].astype(BF16)
    said = refusal(check, release_tensors)
    assert "head.weight (stored [511, 128], needed [512, 128])" in said
    assert "2 of another type: layers.2.attn.attn_sink (stored BF16, needed F32)" in said
    assert "norm.weight (stored F32, needed BF16)" in said


def test_engram_gates_and_compressors_may_be_float32(check, release_tensors):
    names = ["layers.1.engram.q_weight", "layers.2.attn.compressor.wgate.weight"]
    for name in names:
        release_tensors[name] = release_tensors[name].astype(np.float32)
    assert check(release_tensors).spelling == "release"


def test_a_mixture_of_spellings_is_refused(check, release_tensors):
    del release_tensors["layers.4.attn.wkv.scale"]
    release_tensors["layers.4.attn.wkv.weight"] = np.zeros((64, 128), BF16)
    release_tensors["layers.5.attn.wkv.weight"] = np.zeros((64, 128), BF16)
    said = refusal(check, release_tensors)
    assert "mixes two spellings: 406 weights have scales and 2 are stored wide" in said
    assert said.endswith("layers.4.attn.wkv.weight, layers.5.attn.wkv.weight.")


def test_packed_codes_without_any_scale_are_refused(check, release_tensors):
    bare = {n: x for n, x in release_tensors.items() if not n.endswith(".scale")}
    said = refusal(check, bare)
    assert "(dequantized spelling, 645 tensors)" in said
    assert "layers.0.attn.wkv.weight (stored F8_E4M3, needed BF16)" in said


def test_an_absent_drafter_is_legal_unless_it_is_asked_for(check, release_tensors):
    plain = without_drafter(release_tensors)
    for drafter in (None, False):
        matched = check(plain, drafter=drafter)
        assert not matched.drafter and not [n for n in matched.specs if n.startswith("mtp.")]
    said = refusal(check, plain, drafter=True)
    assert "has no mtp.* tensors, and a drafter was asked for" in said


@pytest.mark.parametrize("drafter", [None, False, True])
def test_a_part_of_the_drafter_is_refused_whatever_is_asked(check, release_tensors, drafter):
    del release_tensors["mtp.1.attn_norm.weight"], release_tensors["mtp.2.norm.weight"]
    said = refusal(check, release_tensors, drafter=drafter)
    assert said.endswith(
        "2 of 205 mtp.* tensors are missing: mtp.1.attn_norm.weight, mtp.2.norm.weight."
    )


def test_a_drafter_can_be_left_out(check, release_tensors):
    matched = check(release_tensors, drafter=False)
    assert not matched.drafter and not [n for n in matched.specs if n.startswith("mtp.")]


def test_a_drafter_left_out_is_still_checked(check, release_tensors):
    release_tensors["mtp.0.main_norm.weight"] = np.zeros(64, BF16)
    assert "mtp.0.main_norm.weight" in refusal(check, release_tensors, drafter=False)


def test_a_drafter_unknown_to_the_config_is_unexpected(check, release_tensors, config):
    plain = dataclasses.replace(config, num_nextn_predict_layers=0)
    assert "205 unexpected: mtp.0." in refusal(check, release_tensors, config=plain)
    with pytest.raises(ConfigError, match="num_nextn_predict_layers is 0"):
        check(without_drafter(release_tensors), config=plain, drafter=True)


def test_copies_of_embedding_and_head_are_ignored_and_reported(check, release_tensors):
    copies = {f"mtp.{k}.{part}.weight": np.zeros((512, 128), BF16)
              for k in range(3) for part in ("embed", "head")}  # fmt: skip
    matched = check(release_tensors | copies)
    assert matched.ignored == tuple(sorted(copies))
    assert not set(copies) & set(matched.specs)
    alone = check(without_drafter(release_tensors) | copies)
    assert not alone.drafter and alone.ignored == tuple(sorted(copies))


def test_vision_tensors_without_a_vision_config_are_unexpected(check, release_tensors, config):
    text = dataclasses.replace(config, vision=None)
    said = refusal(check, release_tensors, config=text)
    assert "unexpected: aligner.w1.bias" in said and "vision.norm.weight" in said
    vision = ("vision.", "aligner.", "image_")
    kept = {n: x for n, x in release_tensors.items() if not n.startswith(vision)}
    assert check(kept, config=text).drafter
    assert "missing: aligner.w1.bias" in refusal(check, kept)


def test_a_config_whose_blocks_do_not_divide_is_refused(check, release_tensors, config):
    odd = dataclasses.replace(config, q_lora_rank=48)
    with pytest.raises(ConfigError, match="48 x 128, which does not divide into blocks of 32"):
        check(release_tensors, config=odd)
