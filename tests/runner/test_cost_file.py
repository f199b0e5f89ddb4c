import json

import pytest

from deepinfer_jax.errors import ConfigError
from deepinfer_jax.runner.cost_file import file_name, kept_or_measured, measure, read, write
from deepinfer_jax.sampling.lengths import CostTable

IDENTITY = {"model": "abc", "device": "cpu", "devices": 1, "nextn": 5}
SIZES = [1, 4, 8]


@pytest.fixture
def steps():
    """Runs no step: says each took as many milliseconds as it has rows, and lists them."""

    def time_step(size):
        time_step.asked.append(size)
        return float(size)

    time_step.asked = []
    return time_step


def kept(folder, steps, now=1000.0, identity=IDENTITY, sizes=SIZES):
    return kept_or_measured(
        sizes, steps, folder=folder, identity=identity, ttl_s=60, now=lambda: now
    )


def test_a_size_takes_the_mean_of_the_middle_three_of_five():
    said = iter([100, 5, 1, 2, 3, 90] + [50, 7, 7, 7, 7, 7])
    table = measure([2, 6], lambda size: float(next(said)))
    assert table.sizes.tolist() == [2, 6]
    assert table.ms.tolist() == [7, (2 + 3 + 5) / 3]  # the larger size comes first


def test_a_young_table_is_read_and_an_old_one_measured_again(tmp_path, steps):
    foreign = tmp_path / "step-cost-of-somebody-else.json"
    foreign.write_text("not ours")
    table = kept(tmp_path, steps)
    assert steps.asked == [8] * 6 + [4] * 6 + [1] * 6
    steps.asked.clear()
    again = kept(tmp_path, steps, now=1059.0)
    assert steps.asked == []
    assert (again.sizes.tolist(), again.ms.tolist()) == (table.sizes.tolist(), table.ms.tolist())
    kept(tmp_path, steps, now=1061.0)
    assert len(steps.asked) == 18
    steps.asked.clear()
    kept(tmp_path, steps, now=1100.0)  # 39 s after it was measured again
    kept(tmp_path, steps, now=1061.0, identity=IDENTITY | {"nextn": 3})
    assert len(steps.asked) == 18
    # Ours are two, whole and under their own names, and nobody's file was touched.
    assert len(list(tmp_path.iterdir())) == 3 and foreign.read_text() == "not ours"


def test_a_table_from_the_future_is_not_trusted(tmp_path, steps):
    kept(tmp_path, steps, now=5000.0)
    steps.asked.clear()
    kept(tmp_path, steps, now=1000.0)
    assert len(steps.asked) == 18


def test_without_a_folder_nothing_is_kept(steps):
    assert kept(None, steps).ms.tolist() == [1, 4, 8]


def test_the_table_of_another_device_is_refused_by_name(tmp_path):
    path = tmp_path / "table.json"
    write(path, CostTable.of([(1, 1.0), (4, 2.0)]), IDENTITY, 7.0)
    table, measured_at = read(path, dict(reversed(IDENTITY.items())))
    assert (table.ms.tolist(), measured_at) == ([1, 2], 7.0)
    with pytest.raises(ConfigError) as caught:
        read(path, IDENTITY | {"device": "gpu", "sizes": [1]})
    assert "was measured for device 'cpu', not 'gpu'; sizes None, not [1]." in str(caught.value)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda text: text[:-20], "JSONDecodeError"),
        (lambda text: "[]", "TypeError"),
        (lambda text: text.replace('"abc"', '"abd"'), "its digest does not fit"),
        (lambda text: text.replace('"format": 1', '"format": 2'), "another format"),
        (lambda text: text.replace("1.5", "-1.5"), "one positive time"),
        (lambda text: text.replace("measured_at", "at"), "KeyError"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path, steps, change, reason):
    path = tmp_path / file_name(IDENTITY | {"sizes": SIZES})
    write(path, CostTable.of([(1, 1.5), (4, 2.0), (8, 3.0)]), IDENTITY | {"sizes": SIZES}, 1000.0)
    assert kept(tmp_path, steps).ms.tolist() == [1.5, 2, 3]
    damaged = change(path.read_text())
    path.write_text(damaged)
    with pytest.raises(ConfigError) as caught:
        kept(tmp_path, steps)
    assert f"{path} is damaged (" in caught.value.what and reason in caught.value.what
    assert steps.asked == [] and path.read_text() == damaged


def test_a_missing_table_is_refused(tmp_path):
    with pytest.raises(ConfigError) as caught:
        read(tmp_path / "none.json", IDENTITY)
    assert "cannot be read (No such file or directory)" in str(caught.value)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path, steps):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as caught:
        kept(tmp_path / "file" / "folder", steps)
    assert "cannot be written" in str(caught.value)


def test_the_file_says_what_it_holds(tmp_path):
    path = tmp_path / "table.json"
    write(path, CostTable.of([(1, 1.25), (4, 2.0)]), IDENTITY, 7.0)
    content = json.loads(path.read_text())
    assert content["measured_for"] == IDENTITY and content["time_unit"] == "ms"
    assert content["costs"] == [[1, 1.25], [4, 2.0]]
