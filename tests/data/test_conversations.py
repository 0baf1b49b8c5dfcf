"""Contract of conversations: a row is read whole, or refused by its line; what is left out counts."""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from tests.data.test_arrow import write
from tests.helpers.chat_folders import CHATML, TEMPLATES, chat_folder
from tests.helpers.refusals import named, refused
from trainer.data.formats import tokenized as module
from trainer.data.formats.chat import Chat, open_tokenizer
from trainer.data.formats.conversations import RowSplit, splits_of
from trainer.data.formats.messages import asked_of
from trainer.data.formats.tokenized import tokenized

ASK = {"role": "user", "content": "what is it"}
ANSWER = {"role": "assistant", "content": "the cat"}
TALK = {"messages": [ASK, ANSWER]}
END = "<|im_end|>"
CALL = {"name": "f", "arguments": {"a": 1}}


@pytest.fixture
def chat(tmp_path: Path) -> Chat:
    return open_tokenizer(chat_folder(tmp_path / "chat"))


@pytest.fixture(autouse=True)
def _cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def lines(file: Path, *rows: Any) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return file


def learned(found: Any, chat: Chat) -> list[str]:
    """What counts of each sample."""
    assert found.text.begins is not None and found.text.counts is not None
    tokens, counts = found.text.tokens, found.text.counts
    parts = zip(*(np.split(one, found.text.begins[1:]) for one in (tokens, counts)), strict=True)
    return [chat.tokenizer.decode(a[b].tolist(), skip_special_tokens=False) for a, b in parts]


def texts(chat: Chat, split: RowSplit, learn: str = "completions") -> list[str]:
    """What counts of each row."""
    return learned(tokenized(split, chat, learn, 500), chat)


def said(content: Any, **keys: Any) -> dict[str, Any]:
    return {"messages": [ASK, {"role": "assistant", "content": content, **keys}]}


SHARED = {"conversations": [{"from": "Human", "value": "hi"}, {"from": "gpt", "value": "yes"}]}
NO_WEIGHT = {**ANSWER, "weight": 0}

# A row, and what of it counts; or nothing, and what is told of it.
ROWS: list[tuple[Any, str | None, str]] = [
    ({"messages": [ASK, NO_WEIGHT, ASK, ANSWER]}, "the cat<|im_end|>", ""),
    ({"messages": [ASK, ASK, ANSWER, ANSWER]}, "the cat<|im_end|>" * 2, ""),
    (SHARED, "yes<|im_end|>", ""),
    ({"prompt": "Q: what? A:", "completion": " four!"}, " four!<|im_end|>", ""),
    ({"prompt": "Q: what? A:", "completion": " four!<|im_end|>"}, " four!<|im_end|>", ""),
    ({"prompt": [ASK, ANSWER, ASK], "completion": [ANSWER]}, "the cat<|im_end|>", ""),
    ({"instruction": "hi", "input": None, "output": "yes"}, "yes<|im_end|>", ""),
    ({"instruction": "hi", "output": "yes", "text": "Hello"}, "Hello<|im_end|>", ""),
    ({"text": "  a\r\nb\n"}, "  a\r\nb\n<|im_end|>", ""),
    (said([{"type": "text", "text": "a🐈", "image": None}]), "a🐈<|im_end|>", ""),
    ({**TALK, "prompt": "what is it", "prompt_id": 3}, "the cat<|im_end|>", ""),
    (said("the cat", tool_calls=None, name=None, weight=None), "the cat<|im_end|>", ""),
    ("{", None, "JSON column 2"),
    ("[1]", None, "JSON object"),
    ('{"text": "a", "text": "b"}', None, "twice"),
    ('{"text": NaN}', None, "NaN"),
    ('{"text": "\\ud83d"}', None, "surrogate"),
    ('{"text": "\\ufdd0"}', None, "Unicode"),
    ({"text": 3}, None, "text 3"),
    ({"instruction": "a", "answer": "b"}, None, "'instruction', 'answer'"),
    ({"text": "a", **TALK}, None, "text messages data.input_column"),
    ({"messages": "hi"}, None, "messages 'hi'"),
    ({"messages": [ASK, "hi"]}, None, "messages[1] 'hi'"),
    ({"messages": [{"role": "user"}, ANSWER]}, None, "messages[0] content"),
    ({"messages": [{"role": "user", "content": None}, ANSWER]}, None, ""),
    ({"conversations": [{"from": "chatgpt", "value": "a"}]}, None, "from 'chatgpt'"),
    ({"messages": [ASK, {"role": None, "content": "a"}]}, None, "messages[1] role"),
    (said([{"type": "image"}]), None, "messages[1] text"),
    (said("a", weight=0.5), None, "weight 0.5"),
    (said("a", thinking="a", reasoning="b"), None, "thinking reasoning"),
    (said("a", reasoning="a"), None, "message 2"),
    ({"conversations": [{"from": "observation", "value": "a"}]}, None, "from 'observation' human, gpt"),
    ({**TALK, "tools": {"name": "f"}}, None, "tools"),
    ({**TALK, "tools": ["f"]}, None, "tools 'f' JSON"),
    (said("a", tool_calls=[3]), None, "tool_calls 3"),
    (said("a", tool_calls=[CALL | {"arguments": "[1]"}]), None, "arguments [1]"),
    (said("a", tool_calls=[{"function": "f"}]), None, "function 'f'"),
    (said("a", tool_calls=[CALL]), None, "call 1 tool_calls"),
]


@pytest.mark.parametrize(("row", "counts", "names"), ROWS)
def test_what_a_row_teaches(row: Any, counts: str | None, names: str, chat: Chat, tmp_path: Path) -> None:
    file = lines(tmp_path / "a.jsonl", TALK, row)
    if counts is None:
        with refused(file, "line 2:", names):
            tokenized(RowSplit((file,)), chat, "completions", 99)
    else:
        found = tokenized(RowSplit((file,)), chat, "completions", 500)
        assert learned(found, chat) == [f"the cat{END}", counts]
        assert found.text.counts is not None and found.text.begins is not None
        predicted = [one[1:].sum() for one in np.split(found.text.counts, found.text.begins[1:])]
        assert named(found.notes[0], f"2 {len(found.text.tokens)} {sum(predicted)}")


@pytest.mark.parametrize("fault", [row for row, counts, _ in ROWS if counts is None])
def test_one_bad_row_does_not_end_a_start(fault: Any, chat: Chat, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    split = RowSplit((lines(file, TALK, fault, *[TALK] * 8),))
    found = tokenized(split, chat, "completions", 99, budget=0.1)
    assert [(one.count, one.first) for one in found.left_out] == [(1, "a.jsonl: line 2")]
    assert found.text.begins is not None and len(found.text.begins) == 9
    tokenized(split, chat, "completions", 99, budget=0.01)
    lines(file, TALK, fault, fault, *[TALK] * 7)
    with refused(file, "line 2", "2 10", "data.corrupt_budget", "1"):
        tokenized(split, chat, "completions", 99, budget=0.1)


@pytest.mark.parametrize(("given", "asked"), [*((no, "what") for no in ("", " ", None)), ("a", "what\na")])
def test_what_alpaca_asks(given: str | None, asked: str, chat: Chat, tmp_path: Path) -> None:
    row = {"instruction": "what", "input": given, "output": "four!"}
    split = RowSplit((lines(tmp_path / "a.jsonl", row),))
    wanted = chat.render([{"role": "user", "content": asked}, {"role": "assistant", "content": "four!"}])
    assert texts(chat, split, "all")[0].rstrip() == wanted.rstrip()
    assert asked_of(row).messages == [{"role": "user", "content": asked}]


def test_a_file_of_one_row_lacks_one_to_measure_on(chat: Chat, tmp_path: Path) -> None:
    learned, held = splits_of(lines(tmp_path / "a.jsonl", TALK), None)
    assert len(texts(chat, held)) == 1
    with refused(tmp_path / "a.jsonl", "train.jsonl", "val.jsonl"):
        texts(chat, learned)


def test_each_turn_is_a_sample_of_its_own(tmp_path: Path) -> None:
    chat = open_tokenizer(chat_folder(tmp_path / "chat", "qwen3"))
    file = lines(tmp_path / "a.jsonl", {"messages": [ASK, ANSWER, ASK, {**ANSWER, "content": "no"}]}, TALK)
    thought = "<think>\n\n</think>\n\n"
    together, each = (tokenized(RowSplit((file,)), chat, "completions", 99, each=n) for n in (False, True))
    told = [[named(note, "1 language.turns=each") for note in one.notes] for one in (together, each)]
    assert any(told[0]) and not any(told[1])
    assert learned(together, chat)[0] == f"the cat{END}{thought}no{END}"
    assert learned(each, chat) == [f"{thought}{one}{END}" for one in ("the cat", "no", "the cat")]


def test_keys_of_sharegpt_and_of_the_template_in_a_row(tmp_path: Path) -> None:
    chat = open_tokenizer(chat_folder(tmp_path / "chat", template=f"{{{{ note or 'none' }}}}\n{CHATML}"))
    row = {"conversations": [{"from": "human", "value": "hi", "markdown": 1}, {"from": "gpt", "value": "a"}]}
    file = lines(tmp_path / "a.jsonl", {**row, "chat_template_kwargs": {"note": "cat"}}, row)
    found = tokenized(RowSplit((file,)), chat, "all", 99)
    assert [(one.count, named(one.reason, "markdown")) for one in found.left_out] == [(2, True)]
    text = chat.tokenizer.decode(found.text.tokens.tolist())
    assert text.startswith("cat\n") and "none\n" in text
    lines(file, {**row, "chat_template_kwargs": [1]})
    with refused(file, "line 1", "chat_template_kwargs"):
        tokenized(RowSplit((file,)), chat, "all", 99)


def test_what_is_left_out_is_counted_by_reason(chat: Chat, tmp_path: Path) -> None:
    def of(*rows: Any, most: int = 99) -> Any:
        return tokenized(RowSplit((lines(tmp_path / "a.jsonl", *rows),)), chat, "completions", most)

    empty, none = {"role": "assistant", "content": " \n"}, {"role": "assistant", "content": None}
    rows = [TALK, "", {"text": " "}, {"prompt": "a", "completion": "", "text": None}, {"messages": [ASK]}]
    rows += [{"messages": []}, {"messages": [ASK, empty]}, {"messages": [ASK, empty, ASK, ANSWER]}]
    rows += [{**TALK, "id": 7}, {"messages": [ASK, none]}]
    rows += [{"messages": [{"role": "user", "content": "a " * 99}, ANSWER]}]
    rows += [{"prompt": "b " * 99, "completion": "c"}, {"text": "the cat sat " * 99}, said(END)]
    found = of(*rows)
    counted = [*((1, number) for number in (2, 3, 4, 5, 6)), (3, 7), (1, 9), (2, 11)]
    wanted = [(count, f"a.jsonl: line {number}") for count, number in counted]
    assert [(one.count, one.first) for one in found.left_out] == wanted
    assert named(found.left_out[-1].reason, "99") and named(found.left_out[-2].reason, "'id'")
    assert named(found.notes, "4", "1 language.sequence_length", "1 a.jsonl: line 14: <|im_end|>")
    odd = {"messages": [ASK, {**ANSWER, "name": "a"}, {**ANSWER, "weight": 0, "thinking": "hm"}]}
    found = of({**odd, "tools": [CALL]}, {"text": "a", "completion": "b"}, {**TALK, "prompt": "a"})
    unread = "'name' messages", "'reasoning_content' messages", "'tools'", "'completion'", "'prompt'"
    for one, names in zip(found.left_out, unread, strict=True):
        assert one.count == 1 and named(one.reason, names)
    with refused("1 5"):
        of(TALK, most=5)


@pytest.mark.parametrize("names", [("human", "gpt"), ("User", "model")])
def test_roles_by_other_names_are_the_fields_own(names: tuple[str, str], chat: Chat, tmp_path: Path) -> None:
    talk = [{**ASK, "role": names[0]}, {**ANSWER, "role": names[1]}]
    files = lines(tmp_path / "a.jsonl", TALK), lines(tmp_path / "b.jsonl", {"messages": talk})
    own, other = (tokenized(RowSplit((file,)), chat, "all", 99) for file in files)
    assert own.text.tokens.tolist() == other.text.tokens.tolist()
    assert own.left_out == other.left_out == () and own.notes == other.notes


def test_a_role_that_nobody_knows_is_counted(chat: Chat, tmp_path: Path) -> None:
    critic, tool = {"role": "critic", "content": "a"}, {"role": "tool", "content": "b"}
    rows: list[Any] = [{"messages": [ASK, critic, tool, ANSWER]}, {"messages": [critic, critic, ANSWER]}]
    rows.append({"messages": [ASK, {"role": "bot", "content": "c"}]})
    found = tokenized(RowSplit((lines(tmp_path / "a.jsonl", *rows),)), chat, "completions", 99)
    assert any(line.startswith("2 ") and "'critic'" in line for line in found.notes)
    assert not any("'tool'" in line for line in found.notes)
    assert len(found.left_out) == 1 and "'bot'" in found.left_out[0].reason


def test_a_text_begins_once_and_a_template_is_not_begun_again(tmp_path: Path) -> None:
    for family, bos in (("llama3", "<|begin_of_text|>"), ("gemma", "<bos>")):
        chat = open_tokenizer(chat_folder(tmp_path / family, family))
        file = lines(tmp_path / "a.jsonl", TALK, {"text": "Hello"}, {"text": f"{bos}Hello"})
        found = tokenized(RowSplit((file,)), chat, "all", 99).text
        assert found.begins is not None and chat.bos is not None
        assert (found.tokens == chat.bos).nonzero()[0].tolist() == found.begins.tolist()


def test_lines_with_a_byte_order_mark_and_carriage_returns(chat: Chat, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join([json.dumps(TALK).encode()] * 2))
    assert texts(chat, RowSplit((file,))) == [f"the cat{END}"] * 2
    for content, names in ((json.dumps([TALK]).encode(), "JSON list"), (b"\x1f\x8b\x08", "gzip")):
        file.write_bytes(content)
        with refused(file, names):
            texts(chat, RowSplit((file,)))


def test_rows_of_parquet_and_arrow_are_those_of_lines(tmp_path: Path) -> None:
    chat = open_tokenizer(chat_folder(tmp_path / "chat", "qwen3"))
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}
    longer = [{**ASK, "content": "hi"}, ANSWER, ASK, {**ANSWER, "content": "no"}]
    rows = [[ASK, ANSWER], longer, [ASK, call, ASK, ANSWER]]
    columns = {"messages": rows, "source": ["a", "b", "c"]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet", row_group_size=2)
    write(tmp_path / "hf" / "train", columns)
    wanted = texts(chat, RowSplit((lines(tmp_path / "a.jsonl", *({"messages": row} for row in rows)),)))
    for split in (RowSplit((tmp_path / "a.parquet",)), RowSplit((tmp_path / "hf" / "train",))):
        assert texts(chat, split) == wanted
        assert named(str(tokenized(split, chat, "completions", 500).left_out[0]), "3 'source'")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no")
    with refused(tmp_path / "a.parquet", "Parquet"):
        texts(chat, RowSplit((tmp_path / "a.parquet",)))


def test_files_of_a_split(tmp_path: Path) -> None:
    def files(path: Path, held: str | None = None) -> list[Any]:
        return [([one.name for one in split.files], split.tenth) for split in splits_of(path, held)]

    for name in ["a/train", "a/val", "b/train/1", "b/train/2", "b/test/1", "c/x"]:
        lines(tmp_path / f"{name}.jsonl", TALK)
    for name in ("d/data/train", "d/data/test", "e/data/train_sft", "e/data/test_sft", "e/data/train_gen"):
        count = 1 + name.endswith(("train", "train_sft"))
        for number in range(count):
            lines(tmp_path / f"{name}-{number:05}-of-{count:05}.parquet")
    assert files(tmp_path / "a") == [(["train.jsonl"], None), (["val.jsonl"], None)]
    assert files(tmp_path / "b") == [(["1.jsonl", "2.jsonl"], None), (["1.jsonl"], None)]
    tenths = [(["x.jsonl"], False), (["x.jsonl"], True)]
    assert files(tmp_path / "c") == files(tmp_path / "c" / "x.jsonl") == tenths
    assert [len(names) for names, _ in files(tmp_path / "d")] == [2, 1]
    assert [len(names) for names, _ in files(tmp_path / "e", "test_sft")] == [2, 1]
    for name in ("c/more.jsonl.gz", "c/.hidden", "a/old.jsonl", "a/test.jsonl", "d/data/extra.csv"):
        lines(tmp_path / name)
    beside = {name: splits_of(tmp_path / name, None)[0].beside for name in "abcd"}
    assert beside == {"a": ("old.jsonl",), "b": (), "c": ("more.jsonl.gz",), "d": ("extra.csv",)}
    (tmp_path / "d" / "data" / "train-00001-of-00002.parquet").unlink()
    wrong = {"e": "data.eval_split=test_sft", "d": "1 of the 2", "a": "other.jsonl", "": ".jsonl .parquet"}
    for path, told in wrong.items():
        with refused(told):
            splits_of(tmp_path / path, "other" if path == "a" else None)
    lines(tmp_path / "a" / "train.parquet")
    with refused("train.jsonl train.parquet"):
        splits_of(tmp_path / "a", None)
    for one, other in (("training", "Dev"), ("my_train", "my_val"), ("train.1", "test2")):
        lines(tmp_path / one / f"{one}.jsonl", TALK)
        lines(tmp_path / one / f"{other}.jsonl", TALK)
        with refused(tmp_path / one, f"{other}.jsonl"):
            splits_of(tmp_path / one, None)


@pytest.mark.parametrize("count", [2, 10, 21])
def test_each_tenth_row_is_held_back_and_none_is_in_both(count: int, tmp_path: Path) -> None:
    file = lines(tmp_path / "a.jsonl", *({"text": str(n)} for n in range(1, count + 1)))
    rows: Any = [split.rows() for split in splits_of(file, None)]
    learned, held = ([int(row["text"]) for _, row in split] for split in rows)
    assert held == (list(range(10, count + 1, 10)) or [count])
    assert sorted(learned + held) == list(range(1, count + 1))


def test_another_column_by_its_name(chat: Chat, tmp_path: Path) -> None:
    row = {"prompt": "a", "completion": " b", "chosen": [ASK, ANSWER], "body": "Hello", "text": "naïve"}
    row |= {"instruction": "what", "output": "four!"}
    file = lines(tmp_path / "a.jsonl", row)
    columns = {"chosen": "the cat", "body": "Hello", "prompt": " b", "instruction": "four!"}
    for column, counts in columns.items():
        assert texts(chat, RowSplit((file,), None, column)) == [counts + END]
    with refused(file, "'gone' data.input_column"):
        texts(chat, RowSplit((file,), None, "gone"))


def test_the_cache_is_by_content_and_a_damaged_one_is_made_anew(
    chat: Chat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = mock.Mock(wraps=module._made)
    monkeypatch.setattr(module, "_made", made)
    file = lines(tmp_path / "a.jsonl", TALK, {"text": "Hello", "id": 1})
    first = tokenized(RowSplit((file,)), chat, "completions", 99)

    def again(learn: str = "completions", chat: Chat = chat, length: int = 99) -> int:
        made.reset_mock()
        found = tokenized(RowSplit((file,)), chat, learn, length)
        if not made.called:
            pairs: Any = zip(first.text, found.text, strict=True)
            assert all(np.array_equal(a, b) for a, b in pairs)
            assert (first.left_out, first.notes) == (found.left_out, found.notes)
        return int(made.call_count)

    assert again() == 0
    assert again("all") == again(length=98) == 1
    assert again(chat=open_tokenizer(chat_folder(tmp_path / "chat", template=TEMPLATES["zephyr"]))) == 1
    for damage in (lambda data: data[:-1], lambda data: data[:-1] + b"\x07", lambda _: b""):
        for kept in (tmp_path / "cache" / "trainer" / "conversations").iterdir():
            kept.write_bytes(damage(kept.read_bytes()))
        assert again() == 1
        assert named(capsys.readouterr().out, "damaged")
        assert again() == 0
    lines(file, TALK, {"text": "Hello", "id": 2}, {"text": "more"})
    assert again() == 1
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    assert again() == again() == 1, "where nothing can be kept"
