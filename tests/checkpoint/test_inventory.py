import dataclasses
import tomllib
from pathlib import Path

import pytest

from deepinfer_jax.checkpoint.inventory import component_sizes, inventory, stored_inventory
from deepinfer_jax.checkpoint.shards import open_checkpoint
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "configs"
VISION = ("vision.", "aligner.", "image_")


@pytest.fixture(scope="module")
def release():
    table = tomllib.loads((CONFIGS / "v41_flash.toml").read_text())
    return ModelConfig.from_dict(table["model"])


@pytest.fixture(scope="module")
def stored(release):
    return stored_inventory(inventory(release, drafter=True), "release")


def test_the_release_has_its_published_number_of_tensors(stored):
    draft = [name for name in stored if name.startswith("mtp.")]
    vision = [name for name in stored if name.startswith(VISION)]
    assert len(stored) == 96_085
    assert len(draft) == 2_401
    assert sum(name.endswith(".scale") for name in draft) == 1_177
    assert len(vision) == 266
    assert len(stored) - len(draft) - len(vision) == 93_418
    assert sum(stored[name].nbytes for name in vision) == 970_536_960


def test_the_release_has_its_published_sizes(release):
    sizes = {k: (s.parameters, s.nbytes) for k, s in component_sizes(release).items()}
    assert sizes == {
        "embed": (661_913_600, 1_323_827_200),
        "head": (661_913_600, 1_323_827_200),
        "final_norm": (5_120, 10_240),
        "attention": (5_064_696_320, 5_069_721_600),
        "hc_and_norms": (39_733_360, 158_114_240),
        "routed_experts": (543_581_798_400, 288_777_830_400),
        "shared_experts": (1_415_577_600, 1_416_960_000),
        "routers": (78_673_920, 157_409_280),
        "compressors": (18_352_128, 36_704_256),
        "indexers": (43_516_416, 45_130_752),
        "engram_wkv_and_gates": (314_654_720, 315_043_840),
        "engram_tables": (196_613_849_600, 202_758_032_400),
        "dspark": (14_225_362_530, 7_932_874_632),
        "vision": (411_842_560, 823_685_120),
        "aligner_and_image_vectors": (73_425_920, 146_851_840),
        "total": (763_205_315_794, 510_286_023_000),
    }
    backbone = sizes["total"][0] - sum(
        sizes[k][0] for k in ("engram_tables", "dspark", "vision", "aligner_and_image_vectors")
    )
    assert round(backbone / 1e9, 1) == 551.9


def test_the_release_spells_names_shapes_and_types_as_published(stored):
    for name, dtype, shape in [
        ("layers.3.attn.wq_b.weight", "F8_E4M3", (32768, 1280)),
        ("layers.3.attn.wq_b.scale", "F8_E8M0", (1024, 40)),
        ("layers.39.ffn.experts.383.w2.weight", "I8", (5120, 1152)),
        ("layers.39.ffn.experts.383.w2.scale", "F8_E8M0", (5120, 72)),
        ("layers.14.engram.embed.weight", "F8_E4M3", (384016682, 256)),
        ("layers.14.engram.embed.scale", "F8_E8M0", (384016682, 8)),
        ("layers.1.engram.wkv.weight", "F8_E4M3", (25600, 6144)),
        ("layers.0.hc_attn_fn", "F32", (24, 20480)),
        ("layers.36.attn.indexer.wq_b.weight", "F8_E4M3", (4096, 1280)),
        ("mtp.0.main_proj.weight", "F8_E4M3", (5120, 15360)),
        ("mtp.2.confidence_head.proj.weight", "BF16", (1, 5376)),
        ("mtp.1.ffn.gate.bias_vl", "F32", (128,)),
        ("aligner.w1.weight", "BF16", (5120, 9216)),
        ("vision.patch_embed.proj.weight", "BF16", (1024, 588)),
    ]:
        assert (stored[name].dtypes[0], stored[name].shape) == (dtype, shape), name
    for absent in (
        "layers.20.attn.compressor.wgate.weight",
        "layers.24.attn.indexer.wk.weight",
        "layers.3.attn.indexer.wq_b.weight",
        "layers.0.attn.wq_b",
        "mtp.1.norm.weight",
    ):
        assert absent not in stored, absent


def test_the_golden_file_is_its_configs_inventory(config, release_file):
    checkpoint = open_checkpoint(release_file)
    found = {n: (t.shape, t.dtype) for n, t in checkpoint.tensors.items()}
    stored = stored_inventory(inventory(config, drafter=True), "release")
    assert {n: (s.shape, s.dtypes[0]) for n, s in stored.items()} == found


def test_the_dequantized_spelling_has_no_scales(config):
    specs = inventory(config, drafter=True)
    stored = stored_inventory(specs, "dequantized")
    assert set(stored) == set(specs)
    assert stored["layers.0.ffn.experts.0.w2.weight"].shape == (128, 64)
    assert stored["layers.0.ffn.experts.0.w2.weight"].dtypes == ("BF16",)


def test_without_vision_there_are_no_vision_tensors(config):
    specs = inventory(dataclasses.replace(config, vision=None), drafter=False)
    assert not [name for name in specs if name.startswith((*VISION, "mtp."))]
    assert "layers.0.ffn.gate.bias_vl" in specs


def test_a_drafter_that_the_config_lacks_is_refused(config):
    plain = dataclasses.replace(config, num_nextn_predict_layers=0)
    with pytest.raises(ConfigError, match=r"num_nextn_predict_layers is 0\. .+ Set the draft"):
        inventory(plain, drafter=True)
    assert "dspark" not in component_sizes(plain)


def test_a_width_without_whole_blocks_is_refused(config):
    odd = dataclasses.replace(config, moe_intermediate_size=48)
    with pytest.raises(ConfigError, match=r"w1\.weight would be 48 x 128, which does not divide"):
        stored_inventory(inventory(odd, drafter=False), "release")
