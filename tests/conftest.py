"""The test process: eight CPU devices, strict dtype promotion, golden data by fixture."""

import os
from pathlib import Path

# JAX reads these once, when it is first imported.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
# What the caller's shell sets for a real run must not decide what a test sees.
for _name in [name for name in os.environ if name.startswith("DEEPINFER_")]:
    del os.environ[_name]

import pytest  # noqa: E402

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--golden-dir",
        metavar="DIR",
        default=None,
        help="folder with the complete golden data; without it the tests that need it are skipped",
    )


@pytest.fixture(scope="session")
def golden() -> Path:
    """The golden data that every clone carries."""
    return GOLDEN


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
