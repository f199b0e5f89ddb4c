"""A batch run in a process of its own, with an engine that takes its time: slow_run IN OUT."""

import sys
import time
from pathlib import Path

from protocol.fake_engine import SERVED, FakeEngine

from deepinfer_jax.protocol.batch import answer_batch
from deepinfer_jax.protocol.batch_file import read_batch
from deepinfer_jax.protocol.journal import Journal

if __name__ == "__main__":
    source, out = map(Path, sys.argv[1:])
    engine = FakeEngine(seconds=0.004)
    batch = read_batch(source, SERVED)
    with Journal(out, batch, {"config": "one"}) as journal:
        done = frozenset(journal.done)
        for result, _ in answer_batch(
            batch, done, engine.answer, engine.tokenizer, clock=time.time
        ):
            journal.append(result)
    print(len(engine.asked))
