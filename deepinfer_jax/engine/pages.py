"""Who owns which page of the paged cache, and which finished pages other requests may read.

A page number is held (by running sequences), pending (nobody holds it, but
a launched step may still touch it), cached (published under a key and held by nobody) or free.
Everything happens on the host and between steps; no call waits.
"""

import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from deepinfer_jax.engine.prefix import Provenance
from deepinfer_jax.errors import MemoryPlanError


@dataclass(frozen=True)
class _Entry:
    key: bytes
    parent: bytes
    provenance: Provenance


class PagePool:
    """The pages 1 .. pages - 1; page 0 takes the writes of padding rows and is never given out."""

    def __init__(self, pages: int):
        """Own `pages` pages. Raises MemoryPlanError when none is left beside page 0."""
        if pages < 2:
            raise MemoryPlanError(
                f"The cache has {pages} pages.",
                "Page 0 takes the writes of padding rows, and a sequence needs one of its own.",
                "Give the cache at least 2 pages.",
            )
        self.pages = pages
        self._holders = [0] * pages
        self._fence = [0] * pages  # the last launched step that may touch the page
        self._retired = 0
        self._free = deque(range(1, pages))
        self._pending: dict[int, dict[int, None]] = {}  # fence -> pages, in order of release
        self._entries: dict[int, _Entry] = {}
        self._owner: dict[bytes, int] = {}  # key -> page
        self._children: Counter[bytes] = Counter()  # key -> entries right below it
        self._cached: dict[int, int] = {}  # page -> when it was last let go of
        self._leaves: list[tuple[int, int]] = []  # heap of (when, page); entries may be outdated
        self._clock = 0

    @property
    def allocatable(self) -> int:
        """How many pages `allocate` can give now: free ones and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def pending(self) -> int:
        """Pages that nobody holds and that wait for a step to retire."""
        return sum(map(len, self._pending.values()))

    @property
    def cached(self) -> int:
        """Published pages that nobody holds; `allocate` takes them when no page is free."""
        return len(self._cached)

    def allocate(self, count: int) -> list[int]:
        """`count` pages, held once each; cached ones are given up leaf-first, the oldest first.

        Raises MemoryPlanError, and gives nothing, when there are fewer.
        """
        if count > self.allocatable:
            raise MemoryPlanError(
                f"{count} pages are wanted; {self.allocatable} of {self.pages - 1} can be given.",
                f"Running sequences hold the others, and {self.pending} wait for a step to end.",
                "Run fewer or shorter sequences, or give the cache more memory.",
            )
        while len(self._free) < count:
            self._evict()
        given = [self._free.popleft() for _ in range(count)]
        for page in given:
            self._holders[page] = 1
        return given

    def share(self, pages: Iterable[int]) -> None:
        """One holder more of each page, which somebody holds or which is published."""
        for page in pages:
            if not self._holders[page]:
                assert page in self._entries, f"page {page} is shared but holds nothing"
                if page in self._cached:
                    del self._cached[page]
                else:
                    del self._pending[self._fence[page]][page]
            self._holders[page] += 1

    def release(self, pages: Iterable[int], fence: int) -> None:
        """One holder less of each page.

        A page without holders is reused after step `fence` has retired (and after the fences of
        its earlier holders); if it was published it stays readable until it is evicted.

        `fence` is the last launched step in which the holder takes part.
        """
        for page in pages:
            assert self._holders[page] > 0, f"page {page} is released but nobody holds it"
            self._holders[page] -= 1
            self._fence[page] = max(self._fence[page], fence)
            if not self._holders[page]:
                if self._fence[page] > self._retired:
                    self._pending.setdefault(self._fence[page], {})[page] = None
                else:
                    self._let_go(page)

    def retire(self, step: int) -> None:
        """The host has read the results of all steps up to `step`."""
        self._retired = max(self._retired, step)
        for fence in sorted(f for f in self._pending if f <= step):
            for page in self._pending.pop(fence):
                self._let_go(page)

    def find(self, keys: Iterable[bytes], accept: Callable[[Provenance], bool]) -> list[int]:
        """The pages of the longest prefix of `keys` that is published and accepted.

        Changes nothing: they stay readable until the next `allocate`, and longer once shared.
        """
        found = []
        for key in keys:
            page = self._owner.get(key)
            if page is None or not accept(self._entries[page].provenance):
                break
            found.append(page)
        return found

    def publish(self, page: int, key: bytes, parent: bytes, provenance: Provenance) -> bool:
        """Let others read a held page, full and committed, under `key`.

        The first writer wins: returns False and changes nothing when the key has a page already.
        `parent` is the key of the page before it, or the root.
        """
        assert self._holders[page] > 0, f"page {page} is published but nobody holds it"
        if key in self._owner:
            return False
        assert page not in self._entries, f"page {page} is published under two keys"
        self._entries[page] = _Entry(key, parent, provenance)
        self._owner[key] = page
        self._children[parent] += 1
        return True

    def provenance(self, pages: Iterable[int]) -> list[Provenance]:
        """How each of these published pages came about."""
        return [self._entries[page].provenance for page in pages]

    def frees(self, pages: Iterable[int]) -> int:
        """How many of the pages `allocate` could give at once if their holder let go of them.

        Those that nobody else holds and that no launched step may touch, where no step of that
        holder is under way.
        """
        return sum(self._holders[p] == 1 and self._fence[p] <= self._retired for p in pages)

    def idle(self, pages: Iterable[int]) -> int:
        """How many of the pages count as allocatable, which they no longer do once shared."""
        return sum(page in self._cached for page in pages)

    def check(self, held: Iterable[Iterable[int]] | None = None) -> None:
        """Assert that every page has one place; with `held`, every holder's list, also by whom."""
        users = [p for p in range(1, self.pages) if self._holders[p]]
        pending = [p for pages in self._pending.values() for p in pages]
        everywhere = [*users, *pending, *self._cached, *self._free]
        assert sorted(everywhere) == list(range(1, self.pages)), "a page is lost or in two places"
        assert all(p in self._entries for p in self._cached), "a cached page has no key"
        assert not any(p in self._entries for p in self._free), "a free page has a key"
        assert all(self._owner[e.key] == p for p, e in self._entries.items())
        assert len(self._owner) == len(self._entries), "a key has no page"
        assert self._children == Counter(e.parent for e in self._entries.values())
        assert all(f > self._retired for f, pages in self._pending.items() if pages)
        assert all(self._fence[p] <= self._retired for p in (*self._free, *self._cached))
        if held is not None:
            count = Counter(p for pages in held for p in pages)
            assert count == Counter({p: self._holders[p] for p in users}), "a hold leaks"

    def _let_go(self, page: int) -> None:
        entry = self._entries.get(page)
        if entry is None:
            self._free.append(page)
            return
        self._clock += 1
        self._cached[page] = self._clock
        if not self._children[entry.key]:
            heapq.heappush(self._leaves, (self._clock, page))
        if len(self._leaves) > 2 * self.pages:
            self._leaves = sorted({(self._cached[p], p) for _, p in self._leaves if self._leaf(p)})

    def _evict(self) -> None:
        page = self._oldest_leaf()
        if page is None:
            # Each has a child that somebody holds. A page whose parent is gone cannot be matched
            # until the parent is published again, so a parent may go first.
            page = min(self._cached, key=self._cached.__getitem__)
        del self._cached[page]
        entry = self._entries.pop(page)
        del self._owner[entry.key]
        self._children[entry.parent] -= 1
        if not self._children[entry.parent]:
            del self._children[entry.parent]
            above = self._owner.get(entry.parent)
            if above is not None and self._leaf(above):
                heapq.heappush(self._leaves, (self._cached[above], above))
        self._free.append(page)

    def _oldest_leaf(self) -> int | None:
        while self._leaves:
            when, page = heapq.heappop(self._leaves)
            if self._leaf(page) and self._cached[page] == when:
                return page
        return None

    def _leaf(self, page: int) -> bool:
        return page in self._cached and not self._children[self._entries[page].key]
