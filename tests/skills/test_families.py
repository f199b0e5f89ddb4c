"""The generators: deterministic, right by an independent reading, and split without overlap."""

import json
import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from deepinfer_jax.errors import ConfigError
from deepinfer_jax.skills import documents, facts, mixture, words
from deepinfer_jax.skills.engine_facts import FACTS
from deepinfer_jax.skills.families import FAMILIES, SKILLS, sample
from deepinfer_jax.skills.lookup import at_distance, long_document
from deepinfer_jax.skills.sample import HELD_OUT_SEED, admits, split_of
from deepinfer_jax.skills.tool_calls import expected_call

SPLIT_BY_CONTENT = ("sum_worked", "sum_direct", "sort", "reverse", "count", "json")


def question(s):
    return next(m["content"] for m in reversed(s.messages) if m["role"] == "user")


@pytest.mark.parametrize("skill", SKILLS)
def test_a_sample_is_a_function_of_seed_and_index(skill):
    first = [sample(skill, 5, i, 0.7) for i in range(20)]
    assert first == [sample(skill, 5, i, 0.7) for i in range(20)]
    assert first != [sample(skill, 6, i, 0.7) for i in range(20)]
    assert len({json.dumps(s.messages) for s in first}) > 10


@pytest.mark.parametrize("skill", SKILLS)
def test_every_sample_ends_in_its_answer(skill):
    for i in range(50):
        s = sample(skill, 1, i)
        assert s.skill == skill
        assert s.messages[-1]["role"] == "assistant"
        assert s.messages[-1]["content"] == s.answer
        assert bool(s.answer) == (skill != "tool_call")


def operands(text):
    a, b = map(int, re.findall(r"\d+", text))
    if text.startswith("Subtract"):
        a, b = b, a
    return a, b, bool(re.search(r" - |Subtract|minus", text))


@pytest.mark.parametrize("skill", ["sum_worked", "sum_direct"])
def test_sums_are_right(skill):
    for i in range(300):
        s = sample(skill, 2, i)
        a, b, subtracts = operands(question(s))
        assert int(s.answer) == (a - b if subtracts else a + b) >= 0
        assert s.kind == ("sub" if subtracts else "add")
        assert s.thinking == (skill == "sum_worked")


def test_the_worked_columns_lead_to_the_answer():
    for i in range(300):
        s = sample("sum_worked", 3, i)
        a, b, subtracts = operands(question(s))
        lines = s.messages[-1]["reasoning_content"].split("\n")
        width = max(len(str(a)), len(str(b)))
        listed, steps = lines[:width], lines[width:]
        sign = "-" if subtracts else "+"
        assert "".join(x[1] for x in listed) == str(a).zfill(width)
        assert "".join(x[3] for x in listed) == str(b).zfill(width)
        carry, digits = 0, ""
        for line, column in zip(steps, reversed(listed), strict=True):
            left, right = line.split("=")
            assert left == f"{column}{sign}{carry}"
            x, y = int(column[1]), int(column[3])
            if subtracts:
                digit, borrowed = right.split(" borrow ")
                assert int(digit) - 10 * int(borrowed) == x - y - carry
                carry, digits = int(borrowed), digit + digits
            else:
                assert int(right) == x + y + carry
                carry, digits = int(right[0]), right[1] + digits
        assert int((str(carry) if not subtracts else "") + digits) == int(s.answer)
        assert not (subtracts and carry)


def test_lists_are_sorted_reversed_and_counted():
    for i in range(200):
        for skill in ("sort", "reverse", "count"):
            s = sample(skill, 4, i)
            items = question(s).split(": ")[1].split(", ")
            if skill == "count":
                assert s.answer == str(len(items))
                continue
            assert 3 <= len(items) <= 8
            shown = s.answer.split(": ")[1].split(", ")
            key = int if s.kind == "numbers" else str
            assert shown == (items[::-1] if skill == "reverse" else sorted(items, key=key))


def test_records_become_the_json_object_of_their_fields():
    for i in range(200):
        s = sample("json", 4, i)
        value = json.loads(s.answer)
        assert json.dumps(value) == s.answer and len(value) >= 3
        for key, field in value.items():
            text = str(field).lower() if isinstance(field, bool) else str(field)
            assert re.search(rf"{key}( |: | = ){re.escape(text)}(,|;|\n|$)", question(s))
        assert (s.response_format is not None) == (s.kind == "json_object")


def test_calls_name_a_declared_tool_with_all_its_parameters():
    for i in range(100):
        s = sample("tool_call", 4, i)
        name, arguments = expected_call(s)
        declared = {t["function"]["name"]: t["function"]["parameters"] for t in s.tools}
        assert 2 <= len(declared) <= 3
        assert list(arguments) == declared[name]["required"]
        assert all(str(v) in question(s) for v in arguments.values())


def test_a_tool_reply_follows_the_result_of_its_call():
    for i in range(100):
        s = sample("tool_reply", 4, i)
        calling, result = s.messages[1:3]
        assert result["tool_call_id"] == calling["tool_calls"][0]["id"]
        assert result["content"] == "ok" or result["content"] in s.answer


def test_lookups_ask_for_a_sentence_of_the_document_that_stands_there_once():
    for i in range(100):
        s = sample("lookup", 4, i)
        document = s.messages[0]["content"]
        assert document.count(s.needle) == 1 and s.value in s.needle and s.answer == s.needle
        assert s.value in documents.values(document, s.kind)
        name = next(n for n in words.NAMES if re.search(rf"\b{n}\b", s.needle))
        assert re.search(rf"\b{name}\b", question(s).split("\n\n")[-1])


def test_no_document_states_two_values_for_one_person():
    s = long_document(np.random.default_rng(1), 3000, 17)
    assert len(s.messages) == 34
    for pattern in (r"The code of (\w+) is", r"(\w+) lives in", r"(\w+) leads project"):
        names = re.findall(pattern, s.messages[0]["content"])
        assert names and len(names) == len(set(names))


def test_follow_ups_need_the_turns_before():
    kinds = Counter()
    for i in range(200):
        s = sample("follow_up", 4, i)
        kinds[s.kind] += 1
        assert len([m for m in s.messages if m["role"] == "user"]) >= 2
        if s.kind in ("attribute", "person"):
            assert s.messages[0]["content"].count(s.answer) == 1
        if s.kind == "sum":
            more = int(re.findall(r"\d+", question(s))[0])
            total = int(s.messages[1]["content"])
            subtracts = "subtract" in question(s)
            assert int(s.answer) == (total - more if subtracts else total + more)
            assert s.loss == "final"
    assert set(kinds) == {"attribute", "person", "list", "member", "memory", "sum"}


def test_copies_repeat_or_recall_what_was_shown():
    for i in range(200):
        s = sample("copy", 4, i)
        assert s.answer in s.messages[0]["content"]


def test_difficulty_grows_with_the_level():
    for skill in ("sum_worked", "sum_direct", "lookup", "sort", "reverse", "count", "json"):
        sizes = [
            np.mean([len(str(sample(skill, 4, i, level).messages)) for i in range(150)])
            for level in (0.0, 1.0)
        ]
        assert sizes[1] > sizes[0]


def test_seeds_from_two_to_the_31_are_held_out():
    assert split_of(0) == split_of(HELD_OUT_SEED - 1) == "train"
    assert split_of(HELD_OUT_SEED) == "held_out" and HELD_OUT_SEED == 2**31
    with pytest.raises(ConfigError, match="The data seed is -1"):
        split_of(-1)


def test_an_unknown_skill_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="There is no skill 'poem'. The skills are sum_worked"):
        sample("poem", 0, 0)


@pytest.mark.parametrize("skill", SPLIT_BY_CONTENT)
def test_no_held_out_prompt_is_trained_on(skill):
    def contents(seed, level):
        found = (sample(skill, seed, i, level) for i in range(400))
        return {re.sub(r"^[^:]*: ", "", question(s)) + s.answer for s in found}

    for level in (0.0, 1.0):
        assert contents(HELD_OUT_SEED, level).isdisjoint(contents(1, level))


def test_a_small_space_is_divided_completely():
    # Without the rule, 300 draws of one-digit sums would meet on both sides almost surely.
    train = {question(sample("sum_direct", 1, i, 0.0)) for i in range(600)}
    held_out = {question(sample("sum_direct", HELD_OUT_SEED, i, 0.0)) for i in range(600)}
    assert train.isdisjoint(held_out) and len(train) > len(held_out) > 10


def test_content_is_admitted_to_exactly_one_side():
    texts = [f"text {i}" for i in range(2000)]
    held_out = [t for t in texts if admits("held_out", t)]
    assert all(admits("train", t) != admits("held_out", t) for t in texts)
    assert 80 < len(held_out) < 180 and all(admits(None, t) for t in texts)


def test_facts_are_short_and_their_held_out_wordings_are_never_trained():
    assert 140 <= len(FACTS) <= 170 and all(len(a.split()) <= 20 for *_, a in FACTS)
    trained, held_out = {}, {}
    for form, topic, answer in FACTS:
        assert len(set(facts.WORDINGS[form])) >= 6
        for wording in facts.WORDINGS[form]:
            assert trained.setdefault(wording.format(x=topic).lower(), answer) == answer
        for wording in facts.HELD_OUT_WORDINGS[form]:
            assert held_out.setdefault(wording.format(x=topic).lower(), answer) == answer
    assert trained.keys().isdisjoint(held_out)
    for i in range(300):
        assert question(sample("facts", HELD_OUT_SEED, i)).lower() in held_out


def test_fact_questions_visit_every_topic_first():
    seen = [facts.question(i, "train", False) for i in range(len(FACTS))]
    assert [s.answer for s in seen] == [a for *_, a in FACTS]
    assert facts.question(0, "train", False) != facts.question(len(FACTS), "train", False)


@pytest.mark.parametrize("kind", documents.KINDS)
def test_lookups_at_a_distance_ask_for_the_kind(kind):
    s = at_distance(np.random.default_rng(3), kind, 512, 1024)
    document = s.messages[0]["content"]
    after = documents.about_tokens(document[document.index(s.needle) :])
    assert s.kind == kind and 512 <= after < 1024


def test_the_mixture_follows_its_shares_and_copies_less_later():
    for level, copy in ((0.0, 0.25), (1.0, 0.06)):
        shares = mixture.shares(level)
        assert shares["copy"] == pytest.approx(copy) and sum(shares.values()) == pytest.approx(1)
        drawn = mixture.draw(np.random.default_rng(0), level, 2000)
        counts = Counter(s.skill for s in drawn)
        assert all(abs(counts[k] / 2000 - v) < 0.04 for k, v in shares.items())


def test_the_mixture_adds_system_messages_and_efforts_but_no_other_change():
    drawn = mixture.draw(np.random.default_rng(0), 0.5, 800)
    systems = [s for s in drawn if s.messages[0]["role"] == "system"]
    efforts = [s for s in drawn if s.effort is not None]
    assert 20 < len(systems) < 100 and 5 < len(efforts) < 100
    assert all(s.thinking for s in efforts)
    assert replace(systems[0], messages=()).skill in FAMILIES


def test_words_are_distinct_between_and_inside_lists():
    lists = (words.NAMES, words.CITIES, words.ADJECTIVES, words.NOUNS)
    everything = [w.lower() for pool in lists for w in pool]
    assert len(everything) == len(set(everything)) and len(everything) > 400
