"""The device's state, and the thread that runs one program after the other on it.

A launch may take as long as the program: one whose loops depend on values comes back to the host
for each round. From a thread of its own it never holds up the plan of the step after it.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

Job = Callable[[Any], tuple[Any, Any]]


class Lane:
    """Jobs of one state, in order: (state) -> (state, result)."""

    def __init__(self, state: Any):
        """Own `state`; nobody else may use it from now on."""
        self._state = state
        self._error: BaseException | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="launch")

    def run(self, job: Job) -> Future[Any]:
        """Queue a job; its result comes with the future, and so does what it raises.

        After a job that raised, the state is lost and every later job raises the same.
        """
        return self._thread.submit(self._do, job)

    def wait(self) -> None:
        """Return when the device has done all jobs so far."""
        self._thread.submit(lambda: jax.block_until_ready(self._state)).result()

    def close(self) -> None:
        """Drop jobs that have not begun, and wait for the one that has."""
        self._thread.shutdown(cancel_futures=True)

    def _do(self, job: Job) -> Any:
        if self._error is not None:
            raise self._error
        state, self._state = self._state, None
        try:
            self._state, result = job(state)
        except BaseException as error:
            self._error = error
            raise
        return result
