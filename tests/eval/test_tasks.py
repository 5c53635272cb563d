from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from snapkv_gguf import haystack
from snapkv_gguf.eval.schema import Request, Sample
from snapkv_gguf.eval.tasks import TASKS, _text, _topics, _words, qa
from snapkv_gguf.eval.tasks._sample import TEMPLATE_MARGIN, Case, fit, prompt_text
from snapkv_gguf.eval.tasks._text import hide

LENGTHS = (512, 2048, 8192)

RETRIEVAL = {
    "needle": "string_match_any",
    "question-first": "string_match_any",
    "niah-multikey": "string_match_all",
    "niah-multivalue": "string_match_all",
    "niah-multiquery": "string_match_all",
    "variable-tracking": "string_match_all",
    "qa": "string_match_any",
    "kv-retrieval": "string_match_any",
    "passkey": "string_match_any",
    "questions": "string_match_any",
}
OTHERS = {
    "common-words": "string_match_all",
    "frequent-words": "string_match_all",
    "icl-classification": "first_line",
    "list-functions": "first_line",
    "text": "divergence",
}
METRICS = RETRIEVAL | OTHERS
ASKING = sorted(METRICS.keys() - {"text"})

# tokens, by count(), of one paragraph, document or pair; of a line, word or example for the others
STEPS = dict.fromkeys(
    ("needle", "question-first", "niah-multikey", "niah-multivalue", "niah-multiquery", "qa", "questions"), 170
)
STEPS["kv-retrieval"] = 70


def count(text: str) -> int:
    """A token for every four letters or digits of a word, and one for each sign."""
    return sum(-(-len(part) // 4) for part in re.findall(r"\w+|[^\w\s]", text))


def request(
    lengths: tuple[int, ...] = (2048,),
    n_samples: int = 2,
    seed: int = 1,
    count: Callable[[str], int] = count,
    document: Path | None = None,
    depths: tuple[float, ...] = (0.0, 0.3, 1.0),
) -> Request:
    return Request(lengths, n_samples, seed, count, depths, document=document)


def samples(task: str, req: Request) -> list[Sample]:
    return list(TASKS[task].build(req))


@pytest.fixture
def document(tmp_path: Path) -> Path:
    """240 paragraphs of 24 words, each word with the number of its paragraph."""
    path = tmp_path / "document.txt"
    path.write_text("\n\n".join(" ".join(f"word{i}" for _ in range(23)) + f" end{i}." for i in range(240)))
    return path


def test_registry() -> None:
    assert TASKS.keys() == METRICS.keys() | {"longbench"}
    for name, task in TASKS.items():
        assert task.name == name
        assert task.summary
        assert task.source
    assert {name for name in METRICS if TASKS[name].retrieval} == RETRIEVAL.keys()
    assert {name: task.axis for name, task in TASKS.items() if task.axis and name != "longbench"} == {
        "needle": "depth",
        "question-first": "depth",
        "icl-classification": "variant",
    }


@pytest.mark.parametrize("task", sorted(METRICS))
def test_samples_have_what_the_contract_asks_for(task: str) -> None:
    found = samples(task, request(LENGTHS))
    variants = {"needle": 3, "question-first": 3, "icl-classification": 2}.get(task, 1)
    assert [sample.fields["length"] for sample in found] == [n for n in LENGTHS for _ in range(2 * variants)]
    assert len({sample.id for sample in found}) == len(found)
    assert len({sample.context for sample in found}) == len(found)
    assert all(re.fullmatch(r"[\w.-]+", sample.id) for sample in found)
    assert {sample.task for sample in found} == {task}
    assert {sample.metric for sample in found} == {METRICS[task]}
    assert {len(sample.questions) for sample in found} == {{"questions": 3, "text": 0}.get(task, 1)}
    for question in itertools.chain.from_iterable(sample.questions for sample in found):
        assert all(question.references)
        assert count(", ".join(question.references)) < question.max_tokens or task == "kv-retrieval"
        assert question.lead == question.lead.strip()
        assert not question.lead_in_chat or question.lead


@pytest.mark.parametrize("task", sorted(METRICS))
def test_a_sample_does_not_depend_on_the_others(task: str) -> None:
    few = {sample.id: sample for sample in samples(task, request((2048,), n_samples=2))}
    many = {sample.id: sample for sample in samples(task, request((1024, 2048), n_samples=4, depths=(1.0, 0.3, 0.0)))}
    assert few == {name: many[name] for name in few}
    assert few != {sample.id: sample for sample in samples(task, request((2048,), n_samples=2, seed=2))}


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("task", ASKING)
def test_length(task: str, length: int) -> None:
    for sample in samples(task, request((length,))):
        tokens = count(prompt_text(sample))
        assert tokens <= length - TEMPLATE_MARGIN
        assert tokens >= 0.97 * (length - TEMPLATE_MARGIN) - STEPS.get(task, 30)


@pytest.mark.parametrize("task", ASKING)
def test_few_counts(task: str) -> None:
    calls = 0

    def counting(text: str) -> int:
        nonlocal calls
        calls += 1
        return count(text)

    found = samples(task, request((2048, 8192), count=counting))
    assert calls <= 15 * len(found)


@pytest.mark.parametrize("task", sorted(METRICS.keys() - {"text"}))
def test_a_length_that_is_too_small(task: str) -> None:
    with pytest.raises(
        ValueError, match=rf"length=90: too short for {task}, which needs at least (\d+) tokens"
    ) as error:
        samples(task, request((90,)))
    needed = re.search(r"at least (\d+)", str(error.value))
    assert needed is not None
    assert 90 < int(needed[1]) < 512


def test_fit() -> None:
    case = Case("task", 164, 0, request().rng())
    sizes: list[int] = []

    def make(n: int) -> Sample:
        sizes.append(n)
        return case.sample("metric", "word " * n)

    def words(text: str) -> int:
        return len(text.split())

    req = request(count=words)
    sample, size = fit(req, case, make)
    assert 98 <= size <= 100
    assert words(sample.context) == size
    assert len(sizes) <= 4
    assert fit(req, case, make, maximum=30)[1] == 30
    assert fit(req, case, make, minimum=100)[1] == 100
    with pytest.raises(ValueError, match="needs at least 165 tokens"):
        fit(req, case, make, minimum=101)

    # steps as large as paragraphs: the largest that fits, 3 of 30 tokens
    def coarse(n: int) -> Sample:
        return case.sample("metric", "word " * 30 * n)

    assert fit(req, case, coarse)[1] == 3


def test_hide() -> None:
    pieces = ["a" * 10, "b" * 30, "c" * 60]
    for depth, place in ((0.0, 0), (0.04, 0), (0.06, 1), (0.24, 1), (0.26, 2), (0.69, 2), (0.71, 3), (1.0, 3)):
        expected = [*pieces[:place], "x", *pieces[place:]]
        assert hide(pieces, [(depth, "x")]) == expected, depth
    assert hide(pieces, [(0.9, "x"), (0.9, "y"), (0.1, "z")]) == [pieces[0], "z", *pieces[1:], "x", "y"]


def test_pieces_of_long_paragraphs() -> None:
    paragraph = " ".join(f"Sentence {i} is here." for i in range(100)) + " " + "w" * 700 + " end."
    pieces = list(_text._pieces(paragraph))
    assert all(0 < len(piece) <= 480 for piece in pieces)
    assert all(len(piece) > 400 for piece in pieces[:4])
    assert "".join("".join(pieces).split()) == "".join(paragraph.split())
    assert pieces[0].endswith("is here.")


def test_filler_is_prose() -> None:
    pieces = [piece for paragraph in _text._divided(None) for piece in paragraph]
    assert len(pieces) > 1000
    assert max(map(len, pieces)) <= 480
    assert not any("+----" in piece for piece in pieces)
    assert _text._is_prose("abc defg!!")
    assert not _text._is_prose("abc def!!!")


def test_needle_is_where_it_says() -> None:
    depths = (0.0, 0.25, 0.5, 0.75, 1.0)
    for sample in samples("needle", request((4096,), n_samples=3, depths=depths)):
        (code,) = sample.questions[0].references
        assert re.fullmatch(r"[1-9]\d{5}", code)
        needle = f"Remember: the secret access code is {code}."
        before, after = sample.context.split(needle)
        depth = float(sample.fields["depth"])
        # half of the longest piece, in characters
        assert len(before) / len(before + after) == pytest.approx(depth, abs=250 / len(before + after))
        assert (before == "") == (depth == 0)
        assert (after == "") == (depth == 1)
        assert sample.questions[0].text == "Question: What is the secret access code?"
        assert prompt_text(sample).endswith("\nAnswer: The secret access code is")
        assert not sample.questions[0].lead_in_chat


@pytest.mark.parametrize("depth", [-0.1, 1.5])
def test_needle_outside_of_the_text(depth: float) -> None:
    with pytest.raises(ValueError, match=rf"depth={depth}: must be from 0"):
        samples("needle", request(depths=(depth,)))


def special_numbers(context: str) -> list[tuple[str, str]]:
    return re.findall(r"One of the special numbers of ([a-z]+-[a-z]+) is: (\d{7})\.", context)


@pytest.mark.parametrize(("task", "n_asked"), [("niah-multikey", 1), ("niah-multiquery", 4), ("niah-multivalue", 1)])
def test_niah(task: str, n_asked: int) -> None:
    for sample in samples(task, request(LENGTHS)):
        question = sample.questions[0]
        numbers = special_numbers(sample.context)
        keys = re.findall(r"[a-z]+-[a-z]+", question.text)
        assert len(numbers) == len(dict(map(reversed, numbers))) == 4
        assert len(dict(numbers)) == (1 if task == "niah-multivalue" else 4)
        assert len(keys) == n_asked
        # in the order asked, any order for several values of one key
        expected = [value for key in keys for name, value in numbers if name == key]
        assert sorted(question.references) == sorted(expected)
        if task != "niah-multivalue":
            assert list(question.references) == expected
        assert question.lead_in_chat
        assert all(key in question.lead for key in keys)


def assigned(text: str, value: str) -> list[str]:
    """Variables with the value, read from top to bottom."""
    values: dict[str, str] = {}
    for name, variable, number in re.findall(r"^VAR ([A-Z]{5}) = (?:VAR ([A-Z]{5})|(\d+))$", text, re.MULTILINE):
        values[name] = values[variable] if variable else number
    return [name for name, of in values.items() if of == value]


def test_variable_tracking() -> None:
    for sample in samples("variable-tracking", request((512, 1024, 8192))):
        value = re.findall(r"the value (\d{5})", sample.questions[0].text)[0]
        *example, text = sample.context.split("Track the chain")[1:]
        assert list(sample.questions[0].references) == assigned(text, value)
        assert len(sample.questions[0].references) == 5
        # each but the first from the one before it: four hops
        names = sample.questions[0].references
        assert re.findall(r"^VAR .*", text, re.MULTILINE) == [
            f"VAR {name} = {of}" for name, of in zip(names, [value, *(f"VAR {n}" for n in names)], strict=False)
        ]
        assert "5 variables" in sample.questions[0].lead
        # a solved one in front, from 1024 tokens on
        assert len(example) == (0 if sample.fields["length"] == 512 else 1)
        for solved in example:
            other, names = re.findall(r"value (\d{5}) are: (.*)", solved)[0]
            assert names.split(", ") == assigned(solved, other)
            assert len(names.split(", ")) == 5
            assert not set(names.split(", ")) & set(sample.questions[0].references)


def most_common(text: str) -> list[tuple[str, int]]:
    numbered = re.findall(r"(\d+)\. ([a-z]+)", text)
    assert [int(number) for number, _ in numbered] == list(range(1, len(numbered) + 1))
    return Counter(word for _, word in numbered).most_common()


def test_common_words() -> None:
    for sample in samples("common-words", request((512, 2048, 8192, 16384))):
        *example, text = sample.context.split("In the following numbered list")[1:]
        long = float(sample.fields["length"]) >= 4096
        counts = most_common(text)
        assert {word for word, _ in counts[:10]} == set(sample.questions[0].references)
        assert {n for _, n in counts[:10]} == {30 if long else 6}
        assert {n for _, n in counts[10:]} == {3 if long else 1}
        # found in an answer only where it is meant
        assert not any(
            reference in word for reference in sample.questions[0].references for word, _ in counts if word != reference
        )
        assert len(example) == (0 if sample.fields["length"] == 512 else 1)
        for solved in example:
            answer = re.findall(r"list are: (.*)", solved)[0].split(", ")
            counts_there = most_common(solved.split("\n\n")[1])
            assert {word for word, _ in counts_there[:10]} == set(answer)
            assert {n for _, n in counts_there[:10]} == {10 if long else 3}
            assert {n for _, n in counts_there[10:]} == {3 if long else 1}
            assert not {word for word, _ in counts_there} & {word for word, _ in counts}


def test_common_words_of_a_text_with_more_words_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    few = ("the", *(f"{a}{b}" for a in "bcdfghjk" for b in "aeiou"), *(f"only{c}" for c in "abcdefghijklmnopqrst"))
    monkeypatch.setattr(_words, "vocabulary", lambda: tuple(few))
    (sample,) = samples("common-words", request((2048,), n_samples=1))
    counts = most_common(sample.context.split("In the following numbered list")[-1])
    assert {word for word, _ in counts[:10]} == set(sample.questions[0].references)
    ((common,), (other,)) = ({n for _, n in counts[:10]}, {n for _, n in counts[10:]})
    assert common == 6 * other > 6
    assert count(prompt_text(sample)) > 1800


def test_frequent_words() -> None:
    for sample in samples("frequent-words", request(LENGTHS)):
        text = sample.context.split("\n\n")[1].split()
        (noise, n_noise), *coded = Counter(text).most_common()
        assert noise == "...."
        assert [word for word, _ in coded[:3]] == list(sample.questions[0].references)
        assert all(re.fullmatch(r"[a-z]{6}", word) for word, _ in coded)
        counts = [n_noise, *(n for _, n in coded)]
        assert counts[0] > counts[1] > counts[2] > counts[3] > counts[4]
        # zeta with exponent 2: a quarter, a ninth, a sixteenth of the most frequent, rounded down
        for rank, n in enumerate(counts[:8], start=1):
            assert n == pytest.approx(n_noise / rank**2, abs=1.001)


def test_frequent_words_of_the_shortest_text() -> None:
    def words(text: str) -> int:
        return len(text.split())

    with pytest.raises(ValueError, match="needs at least") as error:
        samples("frequent-words", request((100,), count=words))
    shortest = int(re.findall(r"at least (\d+)", str(error.value))[0])
    for sample in samples("frequent-words", request((shortest,), count=words)):
        counts = [n for _, n in Counter(sample.context.split("\n\n")[1].split()).most_common()]
        # 73 / (k * k * zeta(2)), rounded down
        assert counts == [44, 11, 4, 2, 1, 1]


def test_kv_retrieval() -> None:
    for sample in samples("kv-retrieval", request(LENGTHS, n_samples=4)):
        pairs = json.loads(sample.context.split("\n\n")[1])
        uuid = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
        assert all(re.fullmatch(uuid, text) for text in (*pairs, *pairs.values()))
        assert len(pairs) >= 2
        key = re.findall(uuid, sample.questions[0].text)
        assert sample.questions[0].references == (pairs[key[0]],)


def test_passkey() -> None:
    for sample in samples("passkey", request(LENGTHS, n_samples=4)):
        (key,) = sample.questions[0].references
        assert re.fullmatch(r"\d{5}", key)
        assert sample.context.count(f"The pass key is {key}. Remember it. {key} is the pass key.") == 1
        rest = sample.context.replace(_text.GRASS, "").split("\n\n")[1]
        assert not re.sub(rf"The pass key is {key}\. Remember it\. {key} is the pass key\.", "", rest).strip()


def test_qa() -> None:
    found = samples("qa", request(LENGTHS, n_samples=8))
    kinds = Counter()
    for sample in found:
        documents = re.split(r"\n\nDocument (\d+): ", sample.context)[1:]
        assert [int(number) for number in documents[::2]] == list(range(1, len(documents) // 2 + 1))
        texts = documents[1::2]
        question, (answer,) = sample.questions[0].text, sample.questions[0].references
        found_name = re.search(r"[A-Z]\w+ [A-Z]\w+(?= born| settle| play| called)", question)
        assert found_name is not None, question
        name = found_name[0]
        (golden,) = (text for text in texts if text.startswith(f"{name} was a"))
        last = name.split()[1]
        patterns = {
            "born": r"born in (\w+) in \d{4}",
            "settle": rf"{last} settled in (\w+) in",
            "play": rf"{last} played the (\w+)\.",
            "called": rf"a \w+ called (\w+), which {last}",
        }
        kind = next(word for word in patterns if re.search(rf"\b{word}\b", question))
        kinds[kind] += 1
        assert re.findall(patterns[kind], golden) == [answer]
        assert sample.context.count(answer) == 1
        people = [match[0] for text in texts if (match := re.match(r"[A-Z]\w+ [A-Z]\w+(?= was an? \w+, born)", text))]
        assert len(set(people)) == len(people)
        assert len(people) >= len(texts) // 2
    assert kinds.keys() == {"born", "settle", "play", "called"}


def test_qa_of_a_document_that_has_the_answer_too(tmp_path: Path) -> None:
    path = tmp_path / "document.txt"
    telling = " ".join([*qa._INSTRUMENTS, *qa._PETS])
    path.write_text("\n\n".join(f"{telling}, number {i}\n\n{'nothing of use ' * 8}, number {i}" for i in range(20)))
    found = samples("qa", request(n_samples=12, document=path))
    answers = {sample.questions[0].references[0] for sample in found} & set(telling.split())
    assert len(answers) > 2
    assert all(sample.context.count(sample.questions[0].references[0]) == 1 for sample in found)
    path = tmp_path / "other.txt"
    path.write_text(telling)
    with pytest.raises(ValueError, match=r"each of its paragraphs has '\w+'; give another one"):
        samples("qa", request(n_samples=12, document=path))


def test_questions() -> None:
    firsts = Counter()
    for sample in samples("questions", request((512, 2048), n_samples=8)):
        for question in sample.questions:
            (answer,) = question.references
            assert sample.context.count(answer) == 1
        facts = [re.findall(rf".*{re.escape(q.references[0])}.*", sample.context)[0] for q in sample.questions]
        stop = {"the", "is", "in", "a", "of", "question", "what", "where", "which", "who", "does"}
        for question, fact in itertools.product(sample.questions, facts):
            shared = set(re.findall(r"\w+", question.text.lower())) & set(re.findall(r"\w+", fact.lower())) - stop
            assert bool(shared) == (question.references[0] in fact), (question.text, fact)
        firsts[sample.questions[0].text] += 1
        assert prompt_text(sample).endswith(f"{sample.questions[0].text}\n{sample.questions[0].lead}")
        assert not any(question.text in prompt_text(sample) for question in sample.questions[1:])
    assert len(firsts) == 3


def test_topics_share_no_words() -> None:
    words = Counter(word for topic in _topics.TOPICS.values() for word in topic)
    assert max(words.values()) == 1
    assert len({len(topic) for topic in _topics.TOPICS.values()}) == 1


TOPIC_OF = {word: topic for topic, words in _topics.TOPICS.items() for word in words}
# the longest first: fog, not the beginning of another word
TOPIC_WORD = re.compile(rf"\bthe ({'|'.join(sorted(TOPIC_OF, key=len, reverse=True))})\b")


def test_classification() -> None:
    for sample in samples("icl-classification", request(LENGTHS)):
        question = sample.questions[0]
        examples = re.findall(r"Sentence: (.*)\nLabel: (.*)", sample.context)
        assert set(question.choices) == {label for _, label in examples}
        assert len(question.choices) == {512: 4, 2048: 4, 8192: 17}[int(sample.fields["length"])]
        counts = Counter(label for _, label in examples)
        assert max(counts.values()) - min(counts.values()) <= 1

        # the words tell, whatever the labels are called
        def topic(sentence: str) -> str:
            (found,) = {TOPIC_OF[word] for word in TOPIC_WORD.findall(sentence)}
            return found

        label_of = {topic(sentence): label for sentence, label in examples}
        assert len(set(label_of.values())) == len(label_of) == len(question.choices)
        assert all(label_of[topic(sentence)] == label for sentence, label in examples)
        query = question.text.removeprefix("Sentence: ")
        assert question.references == (label_of[topic(query)],)
        assert query not in [sentence for sentence, _ in examples]
        if sample.fields["variant"] == "topics":
            assert all(name == label for name, label in label_of.items())
        else:
            assert not set(label_of) & set(label_of.values())


def evaluate(name: str, values: list[int]) -> list[int]:
    """The list functions, written once more."""
    copy = list(values)
    match name:
        case "reverse":
            copy.reverse()
        case "sort":
            copy.sort()
        case "sort-descending":
            copy.sort()
            copy.reverse()
        case "drop-first":
            del copy[0]
        case "drop-last":
            copy.pop()
        case "first-two":
            del copy[2:]
        case "repeat-first":
            copy.insert(0, copy[0])
        case "swap-ends":
            copy[0], copy[-1] = copy[-1], copy[0]
        case "rotate":
            copy.append(copy.pop(0))
        case "evens":
            copy = list(filter(lambda v: not v & 1, copy))
        case "odds":
            copy = list(filter(lambda v: v & 1, copy))
        case "above-50":
            copy = list(filter(lambda v: v >= 51, copy))
        case "add-1" | "add-10":
            copy = list(map(int(name.removeprefix("add-")).__add__, copy))
        case "double":
            copy = list(map(sum, zip(copy, copy, strict=True)))
        case "largest":
            copy = sorted(copy)[-1:]
        case _:
            raise AssertionError(name)
    return copy


# fmt: off
NAMES = [
    "reverse", "sort", "sort-descending", "drop-first", "drop-last", "first-two", "repeat-first", "swap-ends", "rotate",
    "evens", "odds", "above-50", "add-1", "add-10", "double", "largest",
]
# fmt: on


def test_list_functions() -> None:
    found = samples("list-functions", request((512, 2048), n_samples=16))
    for length in (512, 2048):
        assert {s.fields["function"] for s in found if s.fields["length"] == length} == set(NAMES)
    for sample in found:
        name = str(sample.fields["function"])
        examples = [
            (json.loads(given), json.loads(output))
            for given, output in re.findall(r"Input: (.*)\nOutput: (.*)", sample.context)
        ]
        assert len(examples) >= 4
        assert all(evaluate(name, given) == output for given, output in examples)
        # no other function of ours explains the examples
        assert [n for n in NAMES if all(evaluate(n, given) == output for given, output in examples)] == [name]
        query = json.loads(sample.questions[0].text.removeprefix("Input: "))
        assert sample.questions[0].references == (str(evaluate(name, query)),)
        assert evaluate(name, query) not in ([], query)
        assert query not in [given for given, _ in examples]


def test_text() -> None:
    text = "\n\n".join(haystack.topics())
    for sample in samples("text", request(LENGTHS, n_samples=3)):
        need = int(sample.fields["length"]) + 256
        assert need <= count(sample.context) < 1.1 * need
        assert sample.context in f"{text}\n\n{text}"
        assert sample.questions == ()
        assert prompt_text(sample) == sample.context


def test_text_of_a_document(document: Path) -> None:
    text = document.read_text()
    total = count(text)
    found = samples("text", request((512,), n_samples=20, document=document))
    assert len({sample.context for sample in found}) == 20
    for sample in found:
        assert sample.context in text
        assert count(sample.context) >= 512 + 256
        assert re.match(r"word(\d+) (word\1 ){22}end\1\.", sample.context)
    # the whole document is one stretch, and no more
    (whole,) = samples("text", request((total - 256,), n_samples=1, document=document))
    assert whole.context == text
    with pytest.raises(ValueError, match=rf"document {document} has 1 stretches of the {total} tokens"):
        samples("text", request((total - 256,), n_samples=2, document=document))


def test_text_that_is_too_short(document: Path) -> None:
    with pytest.raises(ValueError, match=r"length=99999: document .* has 0 stretches of the 100255 tokens .* longer"):
        samples("text", request((99_999,), document=document))
    with pytest.raises(ValueError, match="length=9999999: the text that ships with Python has 0 stretches"):
        samples("text", request((9_999_999,), n_samples=1))


@pytest.mark.parametrize(
    "task", ["needle", "niah-multikey", "niah-multivalue", "niah-multiquery", "qa", "questions", "text"]
)
def test_document_instead_of_what_ships_with_python(task: str, document: Path) -> None:
    own, ours = samples(task, request(document=document)), samples(task, request())
    assert len(own) == len(ours)
    assert all("word" in sample.context and "end" in sample.context for sample in own)
    assert all(len(re.findall(r"\bword\d+\b", sample.context)) > 300 for sample in own)
    python = set(re.findall(r"\w{6,}", " ".join(haystack.topics())))
    assert all(len(python & set(re.findall(r"\w{6,}", sample.context))) < 20 for sample in own)


def test_documents_that_will_not_do(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    with pytest.raises(ValueError, match=rf"document {path}: cannot be read \(No such file"):
        samples("needle", request(document=path))
    path.write_bytes(b"caf\xe9 " * 50)
    with pytest.raises(ValueError, match="is not UTF-8 text"):
        samples("needle", request(document=path))
    path.write_text("short\n\nlines\n")
    with pytest.raises(ValueError, match="no paragraph of at least 80 characters"):
        samples("needle", request(document=path))


def test_a_document_that_is_shorter_than_the_length_is_repeated(tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    path.write_text("The only paragraph of this document, which is long enough to be one, goes on for a line.\n")
    for sample in samples("needle", request((2048,), document=path)):
        assert sample.context.count("The only paragraph") > 50


def test_the_question_before_the_text() -> None:
    for first, last in zip(samples("question-first", request()), samples("needle", request()), strict=True):
        (question,) = first.questions
        assert first.context.startswith("Question: What is the secret access code?\n\n")
        assert first.context.count(question.references[0]) == last.context.count(last.questions[0].references[0]) == 1
        assert "code" not in question.text
        assert question.probe == last.questions[0].text == last.questions[0].probe
