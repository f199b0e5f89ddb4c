import multiprocessing
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from deepinfer_jax.checkpoint.hub import resolve_model
from deepinfer_jax.checkpoint.safetensors import write_safetensors
from deepinfer_jax.errors import CheckpointError

REPO = "deepseek-ai/DeepSeek-V4.1-Flash"
COMMIT = "dba1be0a" + "0" * 32
PINNED = f"{REPO}@{COMMIT}"


def model_folder(path):
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text("{}")
    (path / "tokenizer.json").write_text("{}")
    write_safetensors(path / "model.safetensors", {"x": np.zeros(3, np.float32)})
    return path


class FakeHub:
    """Downloads by writing the files itself; counts what is fetched."""

    def __init__(self, commit=COMMIT, error=None, without=None):
        self.commit, self.error, self.without = commit, error, without
        self.fetched, self.asked = [], []

    def find_commit(self, repo, revision):
        self.asked.append((repo, revision))
        if self.error:
            raise self.error
        return self.commit

    def __call__(self, repo, revision, *, cache_dir, local_only):
        path = Path(cache_dir) / revision
        if local_only:
            if not path.exists():
                raise FileNotFoundError(path)
            return str(path)
        if self.error:
            raise self.error
        self.fetched.append((repo, revision))
        model_folder(path)
        if self.without:
            (path / self.without).unlink()
        return str(path)


def resolve(tmp_path, hub, name=REPO, **options):
    return resolve_model(
        name, cache_dir=tmp_path / "cache", download=hub, find_commit=hub.find_commit, **options
    )


def refusal(*args, **options):
    with pytest.raises(CheckpointError) as caught:
        resolve(*args, **options)
    assert caught.value.why and caught.value.do
    return caught.value.what


def test_a_folder_is_taken_as_it_is(tmp_path):
    hub = FakeHub()
    found = resolve(tmp_path, hub, model_folder(tmp_path / "m"))
    assert (found.path, found.source) == (tmp_path / "m", "folder")
    assert not hub.fetched and not hub.asked


@pytest.mark.parametrize(
    "name",
    ["nono", "./typo", "../typo", ".hidden/name", "a/b/c", "owner/", "owner/name@", "a/b@ c"],
)
def test_a_name_that_is_neither_folder_nor_repository_is_refused(tmp_path, name):
    hub = FakeHub()
    said = refusal(tmp_path, hub, name)
    assert said == (f"There is no model {name!r}: no such folder, and not a repository owner/name.")
    assert not hub.asked and not hub.fetched


def test_a_branch_is_resolved_to_the_commit_that_is_reported(tmp_path):
    hub = FakeHub()
    found = resolve(tmp_path, hub, f"{REPO}@main")
    assert (found.source, found.repo, found.commit) == ("hub", REPO, COMMIT)
    assert hub.asked == [(REPO, "main")] and hub.fetched == [(REPO, COMMIT)]
    assert found.path == tmp_path / "cache" / COMMIT


def test_without_a_revision_the_default_branch_is_pinned(tmp_path):
    hub = FakeHub()
    assert resolve(tmp_path, hub).commit == COMMIT
    assert hub.asked == [(REPO, None)] and hub.fetched == [(REPO, COMMIT)]


def test_a_revision_may_be_a_reference_with_slashes(tmp_path):
    hub = FakeHub()
    resolve(tmp_path, hub, f"{REPO}@refs/pr/3")
    assert hub.asked == [(REPO, "refs/pr/3")]


def test_a_commit_that_is_complete_in_the_cache_needs_no_network(tmp_path):
    resolve(tmp_path, FakeHub(), PINNED)
    offline = FakeHub(error=ConnectionError("no route"))
    assert resolve(tmp_path, offline, PINNED).commit == COMMIT
    assert not offline.asked and not offline.fetched


def test_a_commit_that_is_half_in_the_cache_is_downloaded_again(tmp_path):
    found = resolve(tmp_path, FakeHub(), PINNED)
    file = found.path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    hub = FakeHub()
    resolve(tmp_path, hub, PINNED)
    assert hub.fetched == [(REPO, COMMIT)]


def test_a_download_that_stopped_before_the_tokenizer_is_repaired(tmp_path):
    found = resolve(tmp_path, FakeHub(), PINNED)
    (found.path / "tokenizer.json").unlink()
    hub = FakeHub()
    resolve(tmp_path, hub, PINNED)
    assert hub.fetched == [(REPO, COMMIT)] and (found.path / "tokenizer.json").is_file()


def test_a_repository_without_a_tokenizer_is_refused(tmp_path):
    said = refusal(tmp_path, FakeHub(without="tokenizer.json"), PINNED)
    assert said == f"{tmp_path / 'cache' / COMMIT} has no tokenizer.json."


def test_a_name_that_the_hub_client_refuses_is_a_refusal(tmp_path):
    with pytest.raises(CheckpointError, match=r"could not be downloaded .*HFValidationError"):
        resolve_model(f"owner/a--b@{COMMIT}", cache_dir=tmp_path)


def test_a_download_that_lacks_weights_is_refused(tmp_path):
    said = refusal(tmp_path, FakeHub(without="model.safetensors"), PINNED)
    assert said.endswith("holds no .safetensors file.")


def test_an_unresolvable_revision_is_refused(tmp_path):
    said = refusal(tmp_path, FakeHub(error=ConnectionError("no route")))
    assert said == (
        f"Revision 'main' of {REPO} could not be resolved to a commit (ConnectionError: no route)."
    )


def test_a_failed_download_is_refused(tmp_path):
    said = refusal(tmp_path, FakeHub(error=OSError("disk full")), PINNED)
    assert f"{REPO} at {COMMIT} could not be downloaded into" in said
    assert said.endswith("(OSError: disk full).")


class TransportError(Exception):
    """Like the Hub client's own, not an OSError."""


def test_every_failure_of_the_hub_client_is_a_refusal(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise TransportError("no route")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", fail)
    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(CheckpointError, match=r"to a commit \(OSError: TransportError: no route"):
        resolve_model(REPO, cache_dir=tmp_path)
    with pytest.raises(CheckpointError, match="could not be downloaded .* TransportError"):
        resolve_model(PINNED, cache_dir=tmp_path)


def test_a_local_copy_stands_in_for_the_download(tmp_path):
    hub = FakeHub()
    folder = model_folder(tmp_path / "local")
    found = resolve(tmp_path, hub, local_dir_override=folder)
    assert (found.path, found.source, found.commit) == (folder, "override", None)
    assert not hub.fetched and not hub.asked


def test_a_local_copy_must_be_complete(tmp_path):
    hub, folder = FakeHub(), tmp_path / "local"
    assert "There is no model folder" in refusal(tmp_path, hub, local_dir_override=folder)
    model_folder(folder)
    (folder / "config.json").unlink()
    assert "has no config.json" in refusal(tmp_path, hub, local_dir_override=folder)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").unlink()
    assert "holds no .safetensors file" in refusal(tmp_path, hub, local_dir_override=folder)
    assert not hub.fetched


def test_a_revision_of_a_local_copy_is_refused(tmp_path):
    folder = model_folder(tmp_path / "local")
    said = refusal(tmp_path, FakeHub(), PINNED, local_dir_override=folder)
    assert said == f"Revision {COMMIT!r} was asked for, and the model is the folder {folder}."


class SlowHub(FakeHub):
    """Says when its download has begun, and finishes when it may."""

    def __init__(self, begun, may_finish):
        super().__init__()
        self.begun, self.may_finish = begun, may_finish

    def __call__(self, repo, revision, *, cache_dir, local_only):
        if not local_only:
            self.begun.set()
            self.may_finish.wait(60)
        return super().__call__(repo, revision, cache_dir=cache_dir, local_only=local_only)


def _download_slowly(tmp_path, begun, may_finish):
    resolve(tmp_path, SlowHub(begun, may_finish), PINNED)


@pytest.fixture
def other_process(tmp_path):
    """Another process, in the middle of downloading; call it to let it finish."""
    context = multiprocessing.get_context("forkserver")
    begun, may_finish = context.Event(), context.Event()
    process = context.Process(target=_download_slowly, args=(tmp_path, begun, may_finish))
    process.start()
    assert begun.wait(60)
    yield may_finish.set
    may_finish.set()
    process.join(60)
    assert process.exitcode == 0


def test_a_second_process_downloading_into_the_directory_is_refused(tmp_path, other_process):
    hub = FakeHub()
    said = refusal(tmp_path, hub, PINNED)
    assert f"Another process is downloading {REPO} into {tmp_path / 'cache'} (waited 0 s" in said
    assert not hub.fetched


def test_a_second_process_may_wait_and_then_uses_the_first_ones_files(tmp_path, other_process):
    hub = FakeHub()
    started = time.monotonic()
    other_process()
    found = resolve(tmp_path, hub, PINNED, lock_wait_s=60)
    assert found.path.is_dir() and not hub.fetched
    assert time.monotonic() - started < 60


def test_a_lock_file_left_behind_locks_nothing(tmp_path):
    resolve(tmp_path, FakeHub(), PINNED)
    assert list((tmp_path / "cache").glob(".deepinfer-*.lock"))
    shutil.rmtree(tmp_path / "cache" / COMMIT)
    hub = FakeHub()
    resolve(tmp_path, hub, PINNED)
    assert hub.fetched
