import json

from deepinfer_jax.bench import host_path


def test_the_bench_measures_steps_that_decode_and_logs_them(caplog):
    with caplog.at_level("INFO", logger="deepinfer_jax.bench"):
        figures = host_path.main(["--sequences", "1,5", "--json"])
    assert [f["sequences"] for f in figures] == [1, 5]
    assert all(0 < f["median_us"] <= f["p99_us"] for f in figures)
    assert json.loads(caplog.messages[-1]) == figures
    caplog.clear()
    with caplog.at_level("INFO", logger="deepinfer_jax.bench"):
        host_path.main(["--sequences", "3"])
    assert len(caplog.messages) == 3 and caplog.messages[-1].startswith("| 3 | ")
