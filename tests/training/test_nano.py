import json
import logging

import jax
import numpy as np
import pytest
from training.networks import smoke_folder

from deepinfer_jax.checkpoint.export import encode
from deepinfer_jax.checkpoint.safetensors import write_safetensors
from deepinfer_jax.checkpoint.shards import open_checkpoint
from deepinfer_jax.errors import ConfigError
from deepinfer_jax.training import carry, curve, nano
from deepinfer_jax.training.nano import main
from deepinfer_jax.training.parameters import to_checkpoint
from deepinfer_jax.training.piece import begin
from deepinfer_jax.training.rounding import Row, table
from deepinfer_jax.training.smoke import smoke_config, smoke_plan


@pytest.fixture(scope="module")
def piece(tmp_path_factory):
    folder = tmp_path_factory.mktemp("piece")
    main(["--smoke", "--devices", "1", "--output", str(folder)])
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory, piece):
    folder = smoke_folder(tmp_path_factory.mktemp("model"))
    config = smoke_config()
    weights = to_checkpoint(carry.load(piece, config).weights, config)
    stored = encode(weights, config, drafter=False)
    write_safetensors(folder / "model.safetensors", stored)
    return folder


def test_the_smoke_run_learns_to_count(piece):
    rows = curve.read(piece)
    assert float(rows[0]["long"]) > 1.0
    assert float(rows[-1]["long"]) < 0.1
    assert float(rows[2]["exact:count"]) > 80
    assert all(float(r["skipped"]) == 0 for r in rows)
    assert (piece / "loss.png").exists()


def test_a_finished_run_resumes_at_its_last_step_and_keeps_its_curve(piece, tmp_path):
    main(["--smoke", "--devices", "1", "--resume", str(piece), "--output", str(tmp_path)])
    assert json.loads((tmp_path / "state.json").read_text())["step"] == 40
    assert len(curve.read(tmp_path)) == len(curve.read(piece))
    before = open_checkpoint(piece / "weights_0.safetensors")
    after = open_checkpoint(tmp_path / "weights_0.safetensors")
    for name in before.tensors:
        np.testing.assert_array_equal(before.array(name), after.array(name))


def test_a_resumed_piece_starts_at_its_step_with_fresh_moments(piece):
    state = begin(smoke_plan(jax.devices()[:1]), carry.load(piece, smoke_config()))
    assert int(state.step) == 40
    assert int(state.since) == 0
    assert not any(np.asarray(m).any() for m in state.m.values())


def test_a_run_goes_on_from_a_model_folder_at_the_step_that_is_named(model, tmp_path, monkeypatch):
    seen = {}
    monkeypatch.setattr(nano, "run", lambda *given: seen.update(given=given))
    output = tmp_path / "4"
    main(
        f"--smoke --resume {model} --at 30 --output {output} --steps 50 --set qat_from=0.7 "
        "--set sum_direct=0.22 --xla xla_llvm_disable_expensive_passes=true".split()
    )
    plan, folder, _, _, start, rows = seen["given"]
    assert (start.step, plan.settings.steps, plan.settings.qat_from) == (30, 50, 0.7)
    assert plan.settings.sum_direct == 0.22
    assert plan.compiler["xla_llvm_disable_expensive_passes"] == "true"
    assert (folder, rows) == (output, [])
    assert int(begin(plan, start).step) == 30


@pytest.mark.parametrize("at", ["-1", "40"])
def test_a_step_outside_the_run_is_refused(model, tmp_path, at):
    with pytest.raises(ConfigError) as refusal:
        main(["--smoke", "--resume", str(model), f"--at={at}", "--output", str(tmp_path)])
    assert refusal.value.what == f"--at {at} is not among the steps 0..39 of the run."
    assert "schedule" in refusal.value.why
    assert "--steps" in refusal.value.do


def test_a_piece_without_a_step_saves_its_weights_and_draws_nothing(tmp_path):
    main(["--smoke", "--devices", "1", "--steps", "0", "--output", str(tmp_path)])
    assert json.loads((tmp_path / "state.json").read_text())["step"] == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["state.json", "weights_0.safetensors"]


class _Stop(Exception):
    pass


def test_a_real_run_passes_its_compiler_options_and_shares_on(tmp_path, monkeypatch):
    seen = {}

    class Idle:
        batches = None

        def __init__(self, workers, parts):
            seen.update(workers=workers, parts=parts)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    def plan(settings, source, devices, *, judged, compiler):
        seen.update(settings=settings, judged=judged, compiler=compiler)
        raise _Stop

    monkeypatch.setattr(nano, "Producer", Idle)
    monkeypatch.setattr(nano, "nano_plan", plan)
    with pytest.raises(_Stop):
        main(f"--output {tmp_path} --workers 3 --xla a=1 --xla b=c=d --set sum_direct=0.22".split())
    assert seen["compiler"] == {"a": "1", "b": "c=d"}
    assert seen["judged"] and seen["workers"] == 3
    assert seen["parts"] == nano.SHARES | {"sum_direct": 0.22}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--smoke", "--output is missing. Training writes"),
        ("--smoke --benchmark", "--benchmark and --smoke were given together."),
        ("--resume x --evaluate --benchmark", "--benchmark and --evaluate were given together."),
        ("--output x --profile", "--profile or --only was given without --benchmark."),
        ("--evaluate", "--evaluate was given without --resume."),
        ("--output x --at 5", "--at 5 was given, and --resume names no model folder."),
        ("--output x --xla fast", "'fast' is not NAME=VALUE"),
    ],
)
def test_options_that_cannot_be_used_together_are_refused(given, message, capsys):
    with pytest.raises(SystemExit):
        main(given.split())
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_model_folder_without_a_step_is_refused(model, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["--smoke", "--resume", str(model), "--output", str(tmp_path)])
    message = " ".join(capsys.readouterr().err.split())
    assert f"--resume names the model folder {model}, and --at is missing." in message
    assert "Add --at STEP." in message


def test_the_table_of_what_rounding_costs_is_in_points():
    assert table([Row("sort", 200, 190, 192), Row("all", 400, 392, 390)])[2:] == [
        "| sort | 200 | 95.0 % | 96.0 % | -1.0 |",
        "| all | 400 | 98.0 % | 97.5 % | +0.5 |",
    ]


def test_a_finished_run_is_judged_rounded_and_unrounded(piece, caplog):
    caplog.set_level(logging.INFO, "deepinfer_jax.training")
    main(["--smoke", "--devices", "1", "--resume", str(piece), "--evaluate"])
    assert "| count | 4 | 100.0 % | 100.0 % | +0.0 |" in caplog.messages
    assert "| all | 4 | 100.0 % | 100.0 % | +0.0 |" in caplog.messages
