import json
import os

import pytest

from deepinfer_jax.errors import ConfigError
from deepinfer_jax.protocol.metrics_file import MetricsFile


def test_a_line_is_on_the_disk_as_soon_as_it_was_added(tmp_path):
    path = tmp_path / "new" / "metrics.jsonl"
    with MetricsFile(path) as file:
        file.append({"steps": 1})
        assert path.read_text() == '{"steps": 1}\n'
        file.append({"steps": 2, "share": None})
    assert path.read_text() == '{"steps": 1}\n{"steps": 2, "share": null}\n'


@pytest.mark.parametrize("left", [b"", b'{"ste', b"x" * 200_000])
def test_lines_of_an_earlier_run_stay_but_for_one_that_a_kill_cut_short(tmp_path, left):
    path = tmp_path / "metrics.jsonl"
    for before in (b"", b'{"steps": 1}\n'):
        path.write_bytes(before + left)
        with MetricsFile(path) as file:
            file.append({"steps": 2})
        assert path.read_bytes() == before + b'{"steps": 2}\n'


def test_a_number_that_is_not_finite_is_never_written(tmp_path):
    with MetricsFile(tmp_path / "m") as file, pytest.raises(ValueError, match="not JSON compliant"):
        file.append({"speed": float("nan")})


def test_a_line_that_the_system_takes_in_parts_is_written_whole(tmp_path, monkeypatch):
    real = os.write
    with MetricsFile(tmp_path / "m") as file:
        monkeypatch.setattr(os, "write", lambda target, data: real(target, data[:3]))
        file.append({"steps": 12345})
    assert json.loads((tmp_path / "m").read_text()) == {"steps": 12345}


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file cannot be written: File exists"):
        MetricsFile(tmp_path / "file" / "metrics.jsonl")
