import hashlib
import os
import struct
import subprocess
import sys

import numpy as np
import pytest

from deepinfer_jax.engine.prefix import (
    Provenance,
    accepts,
    extend_keys,
    hit,
    page_keys,
    replay,
    root_key,
    written_after,
)

NAMESPACE = b"tiny|r0|nvfp4-288+mxfp4-68|p4"
COLD, CACHE_EXACT, BOUNDED = Provenance(), Provenance("cache_exact", 1), Provenance("bounded", 1)


def start(keys):
    return [key.hex()[:16] for key in keys]


def image(channels, width, height):
    shape = struct.pack("<3I", channels, width, height)
    return hashlib.sha256(b"IMG" + shape + bytes(range(12))).digest()


def test_keys_of_text_are_those_written_down():
    assert root_key(NAMESPACE, b"").hex()[:16] == "465703430ec5c6f4"
    keys = page_keys(NAMESPACE, b"", [1, 2, 3, 4, 5, 6, 7, 8], page=4)
    assert start(keys) == ["d7d1032443729463", "6639a35cee91fcc5"]
    assert all(len(key) == 32 for key in keys)


def test_a_salt_opens_a_space_of_its_own():
    assert root_key(NAMESPACE, b"tenant-a").hex()[:16] == "84199d69a78f5cd2"
    assert start(page_keys(NAMESPACE, b"tenant-a", [1, 2, 3, 4], page=4)) == ["2758e3518432f37b"]


@pytest.mark.parametrize(
    ("shape", "digest", "keys"),
    [
        ((3, 2, 2), "10ef96730e1f4458", ["731cdda9e3dc348c", "85d381485796e948"]),
        ((3, 4, 1), "b12d4ba2c1f1f947", ["e3593dcd308e84f3", "0e24b2729894e7c5"]),
    ],
)
def test_an_image_is_part_of_every_page_that_it_overlaps(shape, digest, keys):
    assert image(*shape).hex()[:16] == digest
    tokens = np.array([1, 99, 99, 99, 99, 2, 3, 4], np.int32)
    assert start(page_keys(NAMESPACE, b"", tokens, [(image(*shape), 1, 5)], page=4)) == keys


def test_an_image_outside_a_page_is_not_part_of_it():
    tokens = list(range(12))
    plain = page_keys(NAMESPACE, b"", tokens, page=4)
    second = page_keys(NAMESPACE, b"", tokens, [(image(3, 2, 2), 4, 8)], page=4)
    assert second[0] == plain[0]
    assert second[1] != plain[1] and second[2] != plain[2]


def test_a_growing_sequence_hashes_its_new_pages_alone():
    tokens, media = np.arange(1, 40, dtype=np.int32), [(image(3, 2, 2), 10, 18)]
    root = root_key(NAMESPACE, b"")
    keys: list[bytes] = []
    for length in range(len(tokens) + 1):
        keys = extend_keys(keys, root, tokens[:length], media, page=4)
        assert len(keys) == length // 4
    assert keys == page_keys(NAMESPACE, b"", tokens, media, page=4)
    known = [b"\0" * 32]
    assert extend_keys(known, root, tokens[:7], page=4) == known


def test_keys_do_not_depend_on_the_process():
    code = (
        "from deepinfer_jax.engine.prefix import page_keys;"
        "print([k.hex() for k in page_keys(b'ns', b'salt', range(300), [(b'd' * 32, 5, 140)])])"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    here = [k.hex() for k in page_keys(b"ns", b"salt", range(300), [(b"d" * 32, 5, 140)])]
    assert printed == {str(here)}


@pytest.mark.parametrize(
    ("mode", "tokens"), [("bounded", 128), ("cache_exact", 2560), ("exact", 5120)]
)
def test_replay_of_the_release(mode, tokens):
    assert replay(mode, window=128, layers=40, encoder_layers=20) == tokens


def test_replay_is_in_whole_pages():
    assert replay("exact", window=4, layers=5, encoder_layers=2, page=4) == 16
    assert replay("cache_exact", window=4, layers=5, encoder_layers=2, page=4) == 8
    assert replay("bounded", window=16, layers=5, encoder_layers=2) == 128


@pytest.mark.parametrize(
    ("matched", "prompt", "expected"),
    [(2, 13, (8, 4)), (2, 8, (0, 0)), (1, 13, (0, 0)), (3, 13, (12, 8))],
)
def test_hits_are_those_written_down(matched, prompt, expected):
    assert hit(matched, prompt, 4, page=4) == expected


def test_the_last_prompt_token_is_always_computed():
    assert hit(99, 384, 128) == (256, 128)
    assert hit(99, 385, 128) == (384, 256)
    assert hit(2, 257, 256) == (0, 0)


def test_a_page_is_never_better_than_what_its_writer_read():
    assert written_after("bounded", []) == COLD
    assert written_after("exact", [COLD, COLD]) == Provenance("cold", 1)
    assert written_after("exact", [COLD, CACHE_EXACT]) == Provenance("cache_exact", 2)
    assert written_after("cache_exact", [COLD]) == Provenance("cache_exact", 1)
    assert written_after("cache_exact", [BOUNDED]) == Provenance("bounded", 2)
    generations = COLD
    for turn in range(10):
        generations = written_after("bounded", [COLD, generations])
        assert generations == Provenance("bounded", turn + 1)


def test_an_approximate_page_serves_only_bounded_requests():
    for mode in ("exact", "cache_exact"):
        assert [accepts(mode)(p) for p in (COLD, CACHE_EXACT, BOUNDED)] == [True, True, False]
    assert all(accepts("bounded")(p) for p in (COLD, CACHE_EXACT, BOUNDED))
