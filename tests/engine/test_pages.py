from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from deepinfer_jax.engine.pages import PagePool
from deepinfer_jax.engine.prefix import Provenance, accepts, page_keys
from deepinfer_jax.errors import MemoryPlanError

COLD = Provenance()


def chain(count, salt=b""):
    return page_keys(b"ns", salt, range(2 * count), page=2)


def pinned(pool, keys, accept):
    """What is found of a prefix, shared."""
    found = pool.find(keys, accept)
    pool.share(found)
    return found


def published(pool, keys):
    """Pages held by the caller and published under a chain."""
    pages = pool.allocate(len(keys))
    for page, parent, key in zip(pages, [b"root", *keys], keys, strict=False):
        assert pool.publish(page, key, parent, COLD)
    return pages


def test_page_zero_is_never_given_out():
    assert sorted(PagePool(5).allocate(4)) == [1, 2, 3, 4]


def test_a_cache_without_pages_is_refused():
    with pytest.raises(MemoryPlanError) as caught:
        PagePool(1)
    assert str(caught.value) == (
        "The cache has 1 pages. Page 0 takes the writes of padding rows, and a sequence needs one "
        "of its own. Give the cache at least 2 pages."
    )


def test_too_many_pages_are_refused_and_none_is_given():
    pool = PagePool(5)
    pool.release(pool.allocate(2), fence=7)
    with pytest.raises(MemoryPlanError) as caught:
        pool.allocate(3)
    assert str(caught.value) == (
        "3 pages are wanted; 2 of 4 can be given. Running sequences hold the others, and 2 wait "
        "for a step to end. Run fewer or shorter sequences, or give the cache more memory."
    )
    pool.check([])
    pool.retire(7)
    assert len(pool.allocate(4)) == 4


def test_a_page_waits_for_the_latest_fence_of_its_holders():
    pool = PagePool(2)
    pages = pool.allocate(1)
    pool.share(pages)
    pool.release(pages, fence=9)
    pool.release(pages, fence=3)
    pool.retire(8)
    assert pool.allocatable == 0 and pool.pending == 1
    pool.retire(9)
    assert pool.allocate(1) == pages


def test_a_released_chain_is_given_up_from_its_end():
    pool, keys = PagePool(4), chain(3)
    pages = published(pool, keys)
    pool.release(pages, fence=0)
    assert pool.allocatable == pool.cached == 3
    assert pool.allocate(1) == [pages[2]]
    assert pinned(pool, keys, accepts("exact")) == pages[:2]


def test_what_was_used_last_is_given_up_last():
    pool = PagePool(5)
    a, b = chain(2, b"a"), chain(2, b"b")
    first, second = published(pool, a), published(pool, b)
    pool.release(first, fence=0)
    pool.release(second, fence=0)
    pool.release(pinned(pool, a, accepts("exact")), fence=0)
    assert pool.allocate(2) == second[::-1]
    assert pool.find(a, accepts("exact")) == first and not pool.find(b, accepts("exact"))


def test_a_parent_without_holders_goes_before_a_held_child_only_when_nothing_else_is_left():
    pool, keys = PagePool(4), chain(2)
    parent = published(pool, keys[:1])
    own_parent, child = pool.allocate(2)
    assert not pool.publish(own_parent, keys[0], b"root", COLD)
    assert pool.publish(child, keys[1], keys[0], COLD)
    pool.release(parent, fence=0)
    assert pool.allocate(1) == parent
    assert pool.find(keys, accepts("exact")) == []
    assert pool.publish(own_parent, keys[0], b"root", COLD)
    assert pool.find(keys, accepts("exact")) == [own_parent, child]
    pool.check([[*parent], [own_parent, child]])


def test_a_match_ends_at_a_page_of_a_kind_that_is_not_accepted():
    pool, keys = PagePool(4), chain(3)
    pages = pool.allocate(3)
    kinds = [COLD, Provenance("cache_exact", 1), Provenance("bounded", 2)]
    for page, key, parent, kind in zip(pages, keys, [b"root", *keys], kinds, strict=False):
        pool.publish(page, key, parent, kind)
    assert pool.find(keys, accepts("exact")) == pages[:2]
    assert pool.find(keys, accepts("bounded")) == pages
    assert pool.provenance(pages) == kinds


def test_the_first_writer_of_a_key_wins():
    pool, (key,) = PagePool(4), chain(1)
    first, second = pool.allocate(2)
    assert pool.publish(first, key, b"root", COLD)
    assert not pool.publish(second, key, b"root", COLD)
    assert pool.find([key], accepts("exact")) == [first]
    with pytest.raises(AssertionError, match="two keys"):
        pool.publish(first, b"other", b"root", COLD)


def test_what_an_end_frees_at_once():
    pool = PagePool(6)
    pages = pool.allocate(3)
    pool.share(pages[:1])
    assert pool.frees(pages) == 2
    pool.share(pages[1:2])
    pool.release(pages[1:2], fence=4)
    assert pool.frees(pages) == 1
    pool.retire(4)
    assert pool.frees(pages) == 2


def test_a_hold_is_never_dropped_twice():
    pool = PagePool(3)
    pages = pool.allocate(1)
    pool.release(pages, fence=0)
    for misuse in (lambda: pool.release(pages, 0), lambda: pool.share(pages)):
        with pytest.raises(AssertionError):
            misuse()
    with pytest.raises(AssertionError):
        pool.publish(pages[0], b"key", b"root", COLD)


def test_check_finds_a_leak_and_a_double_owner():
    pool = PagePool(4)
    pages = pool.allocate(2)
    pool.check([pages])
    with pytest.raises(AssertionError, match="leaks"):
        pool.check([pages[:1]])
    with pytest.raises(AssertionError, match="leaks"):
        pool.check([pages, pages[:1]])


def test_many_hits_leave_no_trace():
    pool, keys = PagePool(4), chain(3)
    pool.release(published(pool, keys), fence=0)
    for _ in range(1000):
        pool.release(pinned(pool, keys, accepts("exact")), fence=0)
    assert len(pool._leaves) <= 2 * pool.pages + 3
    assert pool.allocate(3)


class Pool(RuleBasedStateMachine):
    """A pool under random use; the model is who holds what, and the fence of each page."""

    @initialize(pages=st.integers(2, 12))
    def start(self, pages):
        self.pool, self.capacity = PagePool(pages), pages - 1
        self.step, self.retired = 1, 0
        self.sequences: list[dict] = []  # keys of its family, pages, next page to publish
        self.pins: list[list[int]] = []
        self.fence = Counter[int]()
        self.content: dict[int, bytes] = {}  # page -> key of what was written, while it is readable

    def held(self):
        return [*(s["pages"] for s in self.sequences), *self.pins]

    @rule(family=st.integers(0, 2))
    def begin(self, family):
        keys = chain(8, b"%d" % family)
        self.sequences.append({"keys": keys, "pages": [], "written": 0})

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), count=st.integers(0, 4))
    def grow(self, data, count):
        sequence = data.draw(st.sampled_from(self.sequences))
        count = min(count, 8 - len(sequence["pages"]))
        before = {p for pages in self.held() for p in pages}
        if count > self.pool.allocatable:
            with pytest.raises(MemoryPlanError):
                self.pool.allocate(count)
            return
        given = self.pool.allocate(count)
        assert len(set(given)) == count and 0 not in given
        assert not before & set(given), "a held page is given out"
        assert all(self.fence[p] <= self.retired for p in given), "a fence is passed"
        for page in given:
            self.content.pop(page, None)
        sequence["pages"] += given

    @precondition(lambda self: any(s["written"] < len(s["pages"]) for s in self.sequences))
    @rule(data=st.data(), kind=st.sampled_from(["cold", "cache_exact", "bounded"]))
    def publish(self, data, kind):
        ready = [s for s in self.sequences if s["written"] < len(s["pages"])]
        sequence = data.draw(st.sampled_from(ready))
        number = sequence["written"]
        page, key = sequence["pages"][number], sequence["keys"][number]
        parent = sequence["keys"][number - 1] if number else b"root"
        owner = self.pool._owner.get(key)
        won = self.pool.publish(page, key, parent, Provenance(kind))
        assert won == (owner is None)
        if won:
            self.content[page] = key
        sequence["written"] += 1

    @rule(family=st.integers(0, 2), length=st.integers(0, 8), bounded=st.booleans())
    def match(self, family, length, bounded):
        keys = chain(8, b"%d" % family)[:length]
        allocatable = self.pool.allocatable
        accept = accepts("bounded" if bounded else "exact")
        found = self.pool.find(keys, accept)
        idle = self.pool.idle(found)
        assert pinned(self.pool, keys, accept) == found
        assert self.pool.allocatable == allocatable - idle
        assert [self.content[p] for p in found] == keys[: len(found)], "another's bytes"
        self.pins.append(found)

    @precondition(lambda self: self.pins)
    @rule(data=st.data(), use=st.booleans())
    def unpin(self, data, use):
        pin = self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))
        if use:  # the request is admitted: its sequence holds them from now on
            keys = [self.content[p] for p in pin]
            family = next((f for f in range(3) if chain(8, b"%d" % f)[: len(pin)] == keys), 0)
            made = {"keys": chain(8, b"%d" % family), "pages": pin, "written": len(pin)}
            self.sequences.append(made)
        else:
            self.drop(pin, 0)

    @precondition(lambda self: self.pool.allocatable and any(s["pages"] for s in self.sequences))
    @rule(data=st.data())
    def fork(self, data):
        """All full pages are shared; the last one, which both go on writing, becomes two."""
        able = [s for s in self.sequences if s["pages"]]
        sequence = data.draw(st.sampled_from(able))
        shared = list(sequence["pages"][:-1])
        self.pool.share(shared)
        (own,) = self.pool.allocate(1)
        assert self.fence[own] <= self.retired
        self.content.pop(own, None)
        written = min(sequence["written"], len(shared))
        self.sequences.append({**sequence, "pages": [*shared, own], "written": written})

    def drop(self, pages, fence):
        self.pool.release(pages, fence)
        for page in pages:
            self.fence[page] = max(self.fence[page], fence)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def end(self, data):
        sequence = self.sequences.pop(data.draw(st.integers(0, len(self.sequences) - 1)))
        self.drop(sequence["pages"], data.draw(st.integers(max(0, self.step - 2), self.step)))

    @rule(depth=st.integers(0, 2))
    def launch(self, depth):
        self.step += 1
        self.retired = max(self.retired, self.step - depth)
        self.pool.retire(self.retired)

    @invariant()
    def every_page_has_one_place(self):
        self.pool.check(self.held())
        used = {p for pages in self.held() for p in pages}
        assert len(used) + self.pool.pending + self.pool.allocatable == self.capacity

    def teardown(self):
        for pages in self.held():
            self.drop(pages, self.step)
        self.pool.retire(self.step)
        self.pool.check([])
        assert sorted(self.pool.allocate(self.capacity)) == list(range(1, self.capacity + 1))


Pool.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPool = Pool.TestCase
