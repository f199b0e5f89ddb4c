"""Jobs on one state, in order, from a thread of their own."""

import threading

import pytest

from deepinfer_jax.engine.lane import Lane


def test_jobs_run_in_order_on_the_state_that_the_one_before_left():
    lane = Lane(1)
    results = [lane.run(lambda state, i=i: (10 * state + i, state)) for i in (2, 3, 4)]
    assert [r.result() for r in results] == [1, 12, 123]
    assert lane.run(lambda state: (state, state)).result() == 1234


def test_a_launch_does_not_hold_up_its_caller():
    lane, go_on = Lane(0), threading.Event()
    slow = lane.run(lambda state: (state, go_on.wait(30)))
    assert not slow.done()
    go_on.set()
    assert slow.result()


def test_what_breaks_one_job_breaks_those_after_it():
    lane = Lane(0)

    def broken(state):
        raise ValueError("no device")

    lane.run(broken)  # nobody looks at it
    with pytest.raises(ValueError, match="no device"):
        lane.run(lambda state: (state, state)).result()


def test_closing_drops_what_has_not_begun():
    lane, go_on = Lane(0), threading.Event()
    lane.run(lambda state: (state, go_on.wait(30)))
    late = lane.run(lambda state: (state, None))
    threading.Timer(0.05, go_on.set).start()
    lane.close()
    assert late.cancelled()
