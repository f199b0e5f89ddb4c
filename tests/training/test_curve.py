import pytest

from deepinfer_jax.errors import ConfigError
from deepinfer_jax.training import curve

ROWS = [
    {"step": 50, "short": 2.0, "index": 0.1, "norm": 1.0, "peak": 4.0},
    {"step": 100, "short": 1.0, "long": 3.0, "index": 0.1, "norm": 0.5, "peak": 5.0},
]


def test_rows_come_back_with_empty_fields_where_a_row_has_none(tmp_path):
    curve.write(tmp_path, ROWS)
    rows = curve.read(tmp_path)
    assert [r["step"] for r in rows] == ["50", "100"]
    assert [r["long"] for r in rows] == ["", "3.0"]


def test_the_picture_is_drawn_from_the_table(tmp_path):
    curve.write(tmp_path, ROWS)
    picture = curve.draw(tmp_path)
    assert picture.name == "loss.png"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_drawing_without_a_table_is_refused(tmp_path):
    with pytest.raises(ConfigError) as refusal:
        curve.draw(tmp_path)
    assert "has no rows" in refusal.value.what
