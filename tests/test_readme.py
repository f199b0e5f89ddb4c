"""What the documents point to exists: every named test, and every relative link."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_named_test_exists(page):
    missing, path = [], None
    for given, name in re.findall(r"`(tests/[\w/]+\.py)?(?:::(test_\w+))?`", page.read_text()):
        path = ROOT / given if given else path
        if not given and not name:
            continue
        assert path is not None
        if not path.is_file() or (name and f"def {name}(" not in path.read_text()):
            missing.append(f"{given}::{name}")
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_relative_link_leads_somewhere(page):
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []
