import json
from pathlib import Path

import pytest

from deepinfer_jax import env as environment
from deepinfer_jax import model_source, settings
from deepinfer_jax.checkpoint.hub import ResolvedModel
from deepinfer_jax.ops.device import Device
from deepinfer_jax.ops.table import select
from deepinfer_jax.report.manifest import manifest, without_folders


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/me/models/nano", "nano"),
        ("/home/me/models/nano/", "nano/"),
        ("~/models/nano", "nano"),
        ("owner/name@main", "owner/name@main"),
        ("models/nano", "models/nano"),
        ("../nano", "../nano"),
        ("--xla_dump_to=/home/me/dump --xla_gpu_autotune_level=0", "--xla_dump_to=dump --xla_"),
        ("a /x/b c", "a b c"),
        (7, 7),
        (None, None),
    ],
)
def test_only_the_last_part_of_an_absolute_path_is_kept(text, shown):
    found = without_folders(text)
    assert found[: len(shown)] == shown if isinstance(shown, str) else found == shown


def test_a_manifest_is_plain_json_with_the_set_variables_and_the_commit():
    env = environment.read(
        {
            "DEEPINFER_JIT_CACHE_DIR": "/home/me/cache/programs",
            "XLA_FLAGS": "--xla_dump_to=/home/me/dump",
        }
    )
    asked = settings.load(env=env, explicit={"max_num_seqs": 3})
    ops = select(Device.described("cpu"), batch_invariant=False)
    made = manifest(
        asked,
        env,
        ops,
        arithmetic="f32qdq",
        cache_format="release",
        max_model_len=64,
        devices=1,
        checkpoint="c0ffee",
        revision="0" * 40,
        tokenizer="7ea",
    )
    assert json.loads(json.dumps(made)) == made
    assert (made["arithmetic"], made["cache_format"]) == ("f32qdq", "release")
    assert made["checkpoint"] == {"model": "nano", "revision": "0" * 40, "digest": "c0ffee"}
    variables = {row["name"]: (row["value"], row["source"]) for row in made["variables"]}
    assert variables["DEEPINFER_JIT_CACHE_DIR"] == ("programs", "environment")
    assert variables["XLA_FLAGS"] == ("--xla_dump_to=dump", "environment")
    assert variables["DEEPINFER_USE_NEXTN_DECODE"] == ("0", "default")
    assert {"key": "engine.max_num_seqs", "value": 3, "source": "explicit"} in made["settings"]
    assert (made["level"], made["device"]["kind"], made["config"]) == ("R1", "cpu", asked.digest())
    assert "/home" not in json.dumps(made)


def test_the_commit_of_a_downloaded_model_is_known(monkeypatch):
    asked = settings.load(explicit={"model": "owner/name@main"})
    found = ResolvedModel(Path("/cache/name"), "hub", "owner/name", "1" * 40)
    named = []

    def resolve(name, *, local_dir_override):
        named.append((name, local_dir_override))
        return found

    monkeypatch.setattr(model_source, "resolve_model", resolve)
    placed, folder, commit = model_source.located(asked, environment.read({}))
    assert named == [("owner/name@main", None)]
    assert (placed.engine.model, folder, commit) == ("/cache/name", found.path, "1" * 40)
