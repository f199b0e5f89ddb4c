"""Where a model's folder is: a path, or a commit of a repository on the Hugging Face Hub.

A download is pinned to one commit, happens under a lock, and counts only when it is complete.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from deepinfer_jax.checkpoint.shards import open_checkpoint
from deepinfer_jax.errors import CheckpointError

FILES = ("*.safetensors", "*.json", "*.txt", "*.model")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_PART = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"  # no leading dot: ./a and ../a are paths
_REPO = re.compile(rf"({_PART}/{_PART})(?:@([\w./-]+))?")
_AT_ONCE_S = 0.01  # long enough for one attempt to take a free lock


class Download(Protocol):
    """Puts the files of one commit into `cache_dir` and returns their folder.

    With `local_only` nothing is fetched; it raises OSError if the commit is not there.
    """

    def __call__(
        self, repo: str, revision: str, *, cache_dir: Path, local_only: bool
    ) -> str | Path:
        """The folder of the commit."""
        ...


@dataclass(frozen=True)
class ResolvedModel:
    """A complete model folder.

    Attributes:
        path: holds config.json and weights, and from the Hub tokenizer.json too.
        source: why this folder: `folder` (a path was given), `override`, or `hub`.
        repo: the Hub repository that was named, if any.
        commit: what was downloaded; None when the folder is the user's own.
    """

    path: Path
    source: Literal["folder", "override", "hub"]
    repo: str | None = None
    commit: str | None = None


def resolve_model(
    name_or_path: str | Path,
    *,
    local_dir_override: str | Path | None = None,
    cache_dir: str | Path | None = None,
    lock_wait_s: float = 0.0,
    download: Download | None = None,
    find_commit: Callable[[str, str | None], str] | None = None,
) -> ResolvedModel:
    """Find the folder of a model, downloading it if it is named by its Hub repository.

    An existing folder is taken as it is. Otherwise the name is a repository, `owner/name` or
    `owner/name@revision`, for which `local_dir_override` stands in when given (then nothing is
    downloaded, and it must hold config and weights). A revision that is not a commit hash, or the
    default branch without one, is resolved to a commit, which the result reports; the commit is
    then used from the cache if it is complete there.

    Two processes must not download into one cache directory: the second waits `lock_wait_s`
    seconds, by default not at all, and is then refused. `download` and `find_commit` (repository,
    revision -> commit hash) default to the Hub's. Raises CheckpointError for all of it.
    """
    name, path = str(name_or_path), Path(name_or_path)
    if path.is_dir():
        check_model_folder(path)
        return ResolvedModel(path, "folder")
    named = _REPO.fullmatch(name)
    if named is None:
        raise CheckpointError(
            f"There is no model {name!r}: no such folder, and not a repository owner/name.",
            "A model is a folder or a Hugging Face repository, which may be pinned as "
            "owner/name@revision.",
            "Check the spelling of the name or path.",
        )
    repo, revision = named.groups()
    if local_dir_override is not None:
        path = Path(local_dir_override)
        _refuse_revision(path, revision)
        check_model_folder(path)
        return ResolvedModel(path, "override", repo)
    commit = _commit_of(repo, revision, find_commit or _hub_commit)
    cache = Path(cache_dir) if cache_dir is not None else _hub_cache()
    path = _download(repo, commit, cache, lock_wait_s, download or _hub_download)
    return ResolvedModel(path, "hub", repo, commit)


def check_model_folder(path: Path) -> None:
    """Raise CheckpointError unless `path` holds config.json and a complete set of weights."""
    if not path.is_dir():
        raise CheckpointError(
            f"There is no model folder {path}.",
            "A local copy must exist and hold config.json and weights.",
            "Correct the path in DEEPINFER_HF_MODEL_DIR, or unset it to download the model.",
        )
    if not (path / "config.json").is_file():
        raise CheckpointError(
            f"{path} has no config.json.",
            "The network is built from it.",
            "Point at a complete model folder, or finish the download.",
        )
    open_checkpoint(path)


def _refuse_revision(path: Path, revision: str | None) -> None:
    if revision is not None:
        raise CheckpointError(
            f"Revision {revision!r} was asked for, and the model is the folder {path}.",
            "A folder has no revision that could be checked against it.",
            "Leave the revision out, or name the Hub repository and no local copy.",
        )


def _commit_of(
    repo: str, revision: str | None, find_commit: Callable[[str, str | None], str]
) -> str:
    if revision is not None and _COMMIT.fullmatch(revision):
        return revision
    try:
        return find_commit(repo, revision)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"Revision {revision or 'main'!r} of {repo} could not be resolved to a commit "
            f"({_short(error)}).",
            "A branch or tag moves, so a run is pinned to the commit that it stands for.",
            f"Name a commit as {repo}@COMMIT, go online, or set DEEPINFER_HF_MODEL_DIR.",
        ) from error


def _download(repo: str, commit: str, cache: Path, lock_wait_s: float, download: Download) -> Path:
    if (path := _complete(repo, commit, cache, download)) is not None:
        return path
    with _lock(repo, cache, lock_wait_s):
        # Another process may have finished it while this one waited.
        if (path := _complete(repo, commit, cache, download)) is not None:
            return path
        try:
            path = Path(download(repo, commit, cache_dir=cache, local_only=False))
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{repo} at {commit} could not be downloaded into {cache} ({_short(error)}).",
                "The Hub could not be reached, refused, or the disk is full.",
                "Try again (finished files are kept), or set DEEPINFER_HF_MODEL_DIR.",
            ) from error
        _check_download(path)
    return path


def _check_download(path: Path) -> None:
    """As `check_model_folder`; a download also brings the tokenizer."""
    check_model_folder(path)
    if not (path / "tokenizer.json").is_file():
        raise CheckpointError(
            f"{path} has no tokenizer.json.",
            "The repository lacks it, and without it no text can be read or written.",
            "Choose another revision, or set DEEPINFER_HF_MODEL_DIR to a complete model folder.",
        )


def _complete(repo: str, commit: str, cache: Path, download: Download) -> Path | None:
    """The commit's folder if the cache holds all of it."""
    try:
        path = Path(download(repo, commit, cache_dir=cache, local_only=True))
        _check_download(path)
    except (OSError, ValueError, CheckpointError):  # ValueError: a name that the client refuses
        return None
    return path


@contextmanager
def _lock(repo: str, cache: Path, wait_s: float) -> Iterator[None]:
    # Imported here: the Hub client takes long to import, and most runs never download.
    from huggingface_hub.utils import WeakFileLock

    cache.mkdir(parents=True, exist_ok=True)
    path = cache / f".deepinfer-{repo.replace('/', '--')}.lock"
    lock = WeakFileLock(path, timeout=max(wait_s, _AT_ONCE_S))
    try:
        lock.__enter__()
    except TimeoutError:
        raise CheckpointError(
            f"Another process is downloading {repo} into {cache} (waited {wait_s:g} s for {path}).",
            "Two downloads into one directory would overwrite each other's unfinished files.",
            "Wait until it is done and start again, or give this process its own cache directory.",
        ) from None
    try:
        yield
    finally:
        lock.__exit__(None, None, None)


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}".strip(": ")


def _hub_cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


@contextmanager
def _client_errors() -> Iterator[None]:
    """Any failure of the Hub client as OSError.

    Its transport errors are classes of another package, whose name depends on the client's version,
    and they have no common base but Exception.
    """
    try:
        yield
    except (OSError, ValueError):
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


def _hub_commit(repo: str, revision: str | None) -> str:
    from huggingface_hub import HfApi

    with _client_errors():
        commit = HfApi().model_info(repo, revision=revision).sha
    if commit is None:
        raise ValueError("the Hub reports no commit")
    return commit


def _hub_download(repo: str, revision: str, *, cache_dir: Path, local_only: bool) -> str:
    from huggingface_hub import snapshot_download

    with _client_errors():
        return snapshot_download(
            repo,
            revision=revision,
            cache_dir=cache_dir,
            local_files_only=local_only,
            allow_patterns=list(FILES),
        )
