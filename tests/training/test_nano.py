import json

import jax
import numpy as np
import pytest

from deepinfer_jax.checkpoint.shards import open_checkpoint
from deepinfer_jax.training import curve
from deepinfer_jax.training.nano import main, smoke_plan
from deepinfer_jax.training.piece import begin


@pytest.fixture(scope="module")
def piece(tmp_path_factory):
    folder = tmp_path_factory.mktemp("piece")
    main(["--smoke", "--devices", "1", "--output", str(folder)])
    return folder


def test_the_smoke_run_learns_to_count_through_all_phases(piece):
    rows = curve.read(piece)
    assert float(rows[0]["short"]) > 1.0
    assert float(rows[-1]["short"]) < 0.1
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

    state = begin(smoke_plan(jax.devices()[:1]), piece)
    assert int(state.step) == 40
    assert int(state.since) == 0
    assert not any(np.asarray(m).any() for m in state.m.values())


def test_an_output_folder_is_required_to_train(capsys):
    with pytest.raises(SystemExit):
        main(["--smoke"])
    assert "--output FOLDER is needed" in capsys.readouterr().err
