"""The tokenizers of the text tests."""

from text.conftest import release, release_file, tiny

__all__ = ["release", "release_file", "tiny"]
