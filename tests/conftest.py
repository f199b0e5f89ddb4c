"""The test process: eight CPU devices, strict dtype promotion, golden data by fixture."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

# JAX reads these once, when it is first imported.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
# What the caller's shell sets for a real run must not decide what a test sees.
for _name in [name for name in os.environ if name.startswith("DEEPINFER_")]:
    del os.environ[_name]

import pytest  # noqa: E402

if TYPE_CHECKING:
    from deepinfer_jax import LLM

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--golden-dir",
        metavar="DIR",
        default=None,
        help="folder with the complete golden data; without it the tests that need it are skipped",
    )
    parser.addoption(
        "--requests",
        metavar="N",
        type=int,
        default=None,
        help="random requests of tests/engine/test_random_requests.py, then on nano as well",
    )
    parser.addoption(
        "--draft-lengths",
        action="store_true",
        help="tests/engine/test_case_c04.py with every number of drafts, and on nano as well",
    )
    parser.addoption(
        "--every-batch",
        action="store_true",
        help="tests/ops/test_batch_invariance.py with every number of rows from 1 to 256, and "
        "tests/engine/test_invariance.py with more numbers of devices",
    )


@pytest.fixture(scope="session")
def golden() -> Path:
    """The golden data that every clone carries."""
    return GOLDEN


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder where engines of the short model keep their compiled programs."""
    from short_llm import compiled_programs

    with compiled_programs(tmp_path_factory.getbasetemp()) as folder:
        yield folder


@pytest.fixture(scope="module")
def short_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the short model."""
    from short_llm import write_short_model

    return write_short_model(tmp_path_factory.mktemp("model") / "short")


@pytest.fixture(scope="module")
def llm(short_folder: Path, compiled: Path) -> "LLM":
    """An engine of the short model."""
    from short_llm import open_llm

    return open_llm(short_folder, compiled)


@pytest.fixture(scope="session")
def golden_dir(request: pytest.FixtureRequest) -> Path:
    """The complete golden data."""
    folder = request.config.getoption("--golden-dir")
    if folder is None:
        pytest.skip("needs the complete golden data: pass --golden-dir DIR")
    path = Path(folder)
    if not path.is_dir():
        pytest.fail(f"--golden-dir {folder} is not a folder")
    return path
