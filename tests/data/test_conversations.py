"""Promise: rows of conversations are read whole, or refused by row in one line; what is left out counts."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

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
from trainer.errors import BadInputError

ASK = {"role": "user", "content": "what is it"}
ANSWER = {"role": "assistant", "content": "the cat"}
TALK = {"messages": [ASK, ANSWER]}
CALL = {"name": "f", "arguments": {"a": 1}}


@pytest.fixture
def chat(tmp_path: Path) -> Chat:
    return open_tokenizer(chat_folder(tmp_path / "chat"))


@pytest.fixture(autouse=True)
def _cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def lines(file: Path, *rows: Any) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return file


def texts(chat: Chat, split: RowSplit, learn: str = "completions", length: int = 500) -> list[str]:
    """What counts of each row."""
    found = tokenized(split, chat, learn, length).text
    assert found.begins is not None and found.counts is not None
    ends = [*found.begins[1:].tolist(), len(found.tokens)]
    each = zip(found.begins.tolist(), ends, strict=True)
    return [
        chat.tokenizer.decode(found.tokens[a:b][found.counts[a:b]].tolist(), skip_special_tokens=False)
        for a, b in each
    ]


END = "<|im_end|>"


@pytest.mark.parametrize(
    ("row", "counts"),
    [
        (TALK, f"the cat{END}"),
        (
            {"messages": [ASK, {"role": "assistant", "content": "no", "weight": 0}, ASK, ANSWER]},
            f"the cat{END}",
        ),
        ({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]}, f"yes{END}"),
        ({"messages": [{**ASK, "role": "human"}, {**ANSWER, "role": "gpt"}]}, f"the cat{END}"),
        ({"messages": [{**ASK, "role": "User"}, {**ANSWER, "role": "model"}]}, f"the cat{END}"),
        ({"conversations": [{"from": "Human", "value": "hi"}, {"from": "GPT", "value": "yes"}]}, f"yes{END}"),
        ({"prompt": "Q: what? A:", "completion": " four!"}, f" four!{END}"),
        ({"prompt": "Q: what? A:", "completion": f" four!{END}"}, f" four!{END}"),
        ({"prompt": [ASK], "completion": [ANSWER]}, f"the cat{END}"),
        ({"prompt": [ASK, ANSWER, ASK], "completion": [ANSWER]}, f"the cat{END}"),
        ({"instruction": "what is", "input": "it", "output": "the cat"}, f"the cat{END}"),
        ({"instruction": "hi", "output": "yes", "text": "Hello"}, f"Hello{END}"),
        ({"instruction": "hi", "input": None, "output": "yes"}, f"yes{END}"),
        ({"text": "Hello there"}, f"Hello there{END}"),
        ({"text": "  a\r\nb\n"}, f"  a\r\nb\n{END}"),
        (
            {
                "messages": [
                    ASK,
                    {"role": "assistant", "content": [{"type": "text", "text": "a🐈", "image": None}]},
                ]
            },
            f"a🐈{END}",
        ),
        ({"messages": [ASK, ASK, ANSWER, ANSWER]}, f"the cat{END}the cat{END}"),
        ({**TALK, "prompt": "what is it", "prompt_id": 3}, f"the cat{END}"),
        ({"messages": [ASK, {**ANSWER, "tool_calls": None, "name": None, "weight": None}]}, f"the cat{END}"),
    ],
)
def test_what_counts_of_a_row(row: Any, counts: str, chat: Chat, tmp_path: Path) -> None:
    assert texts(chat, RowSplit((lines(tmp_path / "a.jsonl", row),))) == [counts]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("{", "line 2: not JSON .column 2."),
        ("[1]", "isn't a JSON object"),
        ('{"text": "a", "text": "b"}', "a key stands there twice"),
        ('{"text": NaN}', "NaN is no number"),
        ('{"text": "\\ud83d"}', "half of a surrogate pair"),
        ('{"text": "\\ufdd0"}', "a character that Unicode reserves"),
        ({"text": 3}, "text is 3, and should be text"),
        ({"instruction": "a", "answer": "b"}, "has 'instruction', 'answer'; a row has text, or prompt"),
        ({"prompt": "a"}, "has 'prompt'; a row has"),
        ({"text": "a", **TALK}, "has text and messages: name one by data.input_column"),
        ({"messages": "hi"}, "messages is 'hi', and should be a list"),
        ({"messages": [ASK, "hi"]}, r"messages\[1\] is 'hi', and should have role and content"),
        ({"messages": [ASK, {"role": "assistant", "content": 1.5}]}, r"messages\[1\]: content is 1.5"),
        ({"messages": [{"role": "user"}, ANSWER]}, r"messages\[0\]: has no content"),
        ({"messages": [ASK, {"role": None, "content": "a"}]}, "role is nothing"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}, ANSWER]}, "only parts of type text"),
        ({"messages": [ASK, {**ANSWER, "weight": 0.5}]}, "weight is 0.5, and should be 0 or 1"),
        ({"messages": [ASK, {**ANSWER, "thinking": "a", "reasoning": "b"}]}, "thinking and reasoning"),
        ({"messages": [ASK, {**ANSWER, "reasoning": ["a"]}]}, r"messages\[1\]: reasoning is"),
        ({"messages": [ASK, {**ANSWER, "reasoning": "a"}]}, "thinking of message 2"),
        (
            {"conversations": [{"from": "observation", "value": "a"}]},
            "from is 'observation', and should be human, gpt",
        ),
        ({**TALK, "tools": "["}, r"tools is '\[': not JSON"),
        ({**TALK, "tools": {"name": "f"}}, "tools is {'name': 'f'}, and should be a list of objects"),
        ({**TALK, "tools": ["f"]}, "tools is 'f': not JSON"),
        ({"messages": [ASK, {**ANSWER, "tool_calls": "f()"}]}, r"messages\[1\]: tool_calls is 'f\(\)': not"),
        ({"messages": [ASK, {**ANSWER, "tool_calls": [3]}]}, "tool_calls holds 3, and should hold objects"),
        (
            {"messages": [ASK, {**ANSWER, "tool_calls": [CALL | {"arguments": "[1]"}]}]},
            r"arguments is \[1\], and",
        ),
        (
            {"messages": [ASK, {**ANSWER, "tool_calls": [{"function": "f"}]}]},
            "function is 'f', and should be",
        ),
        ({"messages": [ASK, {**ANSWER, "tool_calls": [CALL]}]}, "leaves call 1 of tool_calls out"),
    ],
)
def test_a_row_that_cannot_be_meant_is_named(row: Any, says: str, chat: Chat, tmp_path: Path) -> None:
    file = lines(tmp_path / "a.jsonl", TALK, row if isinstance(row, dict) else row + "\n")
    with pytest.raises(BadInputError, match=says) as error:
        tokenized(RowSplit((file,)), chat, "completions", 99)
    assert str(error.value).startswith(f"{file}: line 2: ")
    assert "\n" not in str(error.value)


FAULTS: list[Any] = [
    "{",
    {"messages": [{"role": "user", "content": None}, ANSWER]},
    {"messages": [{"role": "user"}, ANSWER]},
    {"messages": [{"role": "user"}, {"role": "user"}, ANSWER]},
    {"conversations": [{"from": "chatgpt", "value": "a"}]},
    {"messages": [ASK, {**ANSWER, "reasoning": "a"}]},
]


@pytest.mark.parametrize("nth", range(len(FAULTS)))
def test_one_bad_row_does_not_end_a_start(nth: int, chat: Chat, tmp_path: Path) -> None:
    fault = FAULTS[nth]
    file = lines(tmp_path / "a.jsonl", TALK, fault if isinstance(fault, dict) else fault + "\n", *[TALK] * 8)
    found = tokenized(RowSplit((file,)), chat, "completions", 99, budget=0.1)
    assert [(one.count, one.first) for one in found.left_out] == [(1, "a.jsonl: line 2")]
    assert found.text.begins is not None and len(found.text.begins) == 9
    for budget in (0.0, 0.01):
        with refused(file, "line 2") if not budget else nullcontext():
            tokenized(RowSplit((file,)), chat, "completions", 99, budget=budget)
    lines(file, *[fault if isinstance(fault, dict) else fault + "\n"] * 2, *[TALK] * 8)
    with refused(file, "line 1", "2 10", "data.corrupt_budget", "1"):
        tokenized(RowSplit((file,)), chat, "completions", 99, budget=0.1)


def test_bad_rows_are_counted_by_reason(chat: Chat, tmp_path: Path) -> None:
    file = lines(tmp_path / "a.jsonl", *[TALK] * 4, *(one for one in FAULTS if isinstance(one, dict)))
    found = tokenized(RowSplit((file,)), chat, "completions", 99, budget=1.0)
    assert [one.count for one in found.left_out] == [3, 1, 1]
    assert named(found.left_out[0].reason, "messages[0]")
    lines(file, *[FAULTS[1]] * 1000)
    for budget, names in ((0.1, "line 1: 100 100"), (1.0, "1,000 line 1")):
        with refused(file, names):
            tokenized(RowSplit((file,)), chat, "completions", 99, budget=budget)


@pytest.mark.parametrize(
    ("given", "asked"), [("", "what"), (" ", "what"), (None, "what"), ("is it", "what\nis it")]
)
def test_what_alpaca_asks(given: str | None, asked: str, chat: Chat, tmp_path: Path) -> None:
    """As LLaMA-Factory and others join the columns; also where it is asked by predict."""
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
    together = tokenized(RowSplit((file,)), chat, "completions", 99)
    assert any(note.startswith("1 ") and named(note, "language.turns=each") for note in together.notes)
    assert texts(chat, RowSplit((file,)))[0] == f"the cat{END}{thought}no{END}"
    each = tokenized(RowSplit((file,)), chat, "completions", 99, each=True)
    assert not any(named(note, "language.turns=each") for note in each.notes)
    assert each.text.begins is not None and each.text.counts is not None and len(each.text.begins) == 3
    said = chat.tokenizer.decode(each.text.tokens[each.text.counts].tolist(), skip_special_tokens=False)
    assert said == "".join(f"{thought}{one}{END}" for one in ("the cat", "no", "the cat"))


def test_keys_of_sharegpt_and_of_the_template_in_a_row(tmp_path: Path) -> None:
    chat = open_tokenizer(chat_folder(tmp_path / "chat", template=f"{{{{ note or 'none' }}}}\n{CHATML}"))
    row = {
        "conversations": [{"from": "human", "value": "hi", "markdown": 1}, {"from": "gpt", "value": "yes"}]
    }
    file = lines(tmp_path / "a.jsonl", {**row, "chat_template_kwargs": {"note": "cat"}}, row)
    found = tokenized(RowSplit((file,)), chat, "all", 99)
    assert [(one.count, named(one.reason, "markdown")) for one in found.left_out] == [(2, True)]
    text = chat.tokenizer.decode(found.text.tokens.tolist())
    assert text.startswith("cat\n") and "none\n" in text
    lines(file, {**row, "chat_template_kwargs": [1]})
    with refused(file, "line 1", "chat_template_kwargs"):
        tokenized(RowSplit((file,)), chat, "all", 99)


def test_what_is_left_out_is_counted_by_reason(chat: Chat, tmp_path: Path) -> None:
    empty = {"role": "assistant", "content": " \n"}
    rows = [
        TALK,
        "\n",
        {"text": " "},
        {"prompt": "a", "completion": "", "text": None},
        {"messages": [ASK]},
        {"messages": []},
    ]
    rows += [{"messages": [ASK, empty]}, {"messages": [ASK, empty, ASK, ANSWER]}, {**TALK, "id": 7}]
    rows += [{"messages": [ASK, {"role": "assistant", "content": None}]}]
    rows += [
        {"messages": [{"role": "user", "content": "a " * 99}, ANSWER]},
        {"prompt": "b " * 99, "completion": "c"},
    ]
    rows += [{"text": "the cat sat " * 99}, {"messages": [ASK, {"role": "assistant", "content": END}]}]
    found = tokenized(RowSplit((lines(tmp_path / "a.jsonl", *rows),)), chat, "completions", 99)
    assert [str(one) for one in found.left_out] == [
        "1 empty row (a.jsonl: line 2)",
        "1 row of empty text (a.jsonl: line 3)",
        "1 row with an empty completion (a.jsonl: line 4)",
        "1 conversation without an assistant turn to learn from (a.jsonl: line 5)",
        "1 conversation without messages (a.jsonl: line 6)",
        "3 conversations with an empty assistant turn (a.jsonl: line 7)",
        "1 row with 'id', which isn't read (a.jsonl: line 9)",
        "2 conversations of more than 99 tokens (a.jsonl: line 11)",
    ]
    notes = "\n".join(found.notes)
    assert "4 rows of" in notes
    odd = {"messages": [ASK, {**ANSWER, "name": "a"}, {**ANSWER, "weight": 0, "thinking": "hm"}]}
    odd |= {"tools": [CALL]}
    more = [odd, {"text": "a", "completion": "b"}, {**TALK, "prompt": "a"}]
    found = tokenized(RowSplit((lines(tmp_path / "c.jsonl", *more),)), chat, "completions", 99)
    reads = "which the chat template doesn't write into what is learned (c.jsonl: line 1)"
    assert [str(one) for one in found.left_out] == [
        f"1 conversation with 'name' in messages, {reads}",
        f"1 conversation with 'reasoning_content' in messages that don't count, {reads}",
        f"1 conversation with 'tools', {reads}",
        "1 row with 'completion', which isn't read (c.jsonl: line 2)",
        "1 row with 'prompt', which isn't read (c.jsonl: line 3)",
    ]
    assert "1 texts are longer than language.sequence_length, and cut" in notes
    assert "1 rows hold the text of a special token" in notes and "a.jsonl: line 14: <|im_end|>" in notes
    with pytest.raises(BadInputError, match=r"nothing to learn from is left \(1 conversation of more than 5"):
        tokenized(RowSplit((lines(tmp_path / "b.jsonl", TALK),)), chat, "completions", 5)


@pytest.mark.parametrize(
    "names", [("human", "gpt"), ("HUMAN", "Gpt"), ("User", "Assistant"), ("user", "model")]
)
def test_roles_by_other_names_are_learned_as_the_fields_own(
    names: tuple[str, str], chat: Chat, tmp_path: Path
) -> None:
    """And what predict asks by is what was learned."""
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
    """Double BOS: by the tokenizer, and by the template or the text."""
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
    file.write_bytes(json.dumps([TALK]).encode())
    with pytest.raises(BadInputError, match="is one JSON list; write a line for each"):
        texts(chat, RowSplit((file,)))
    file.write_bytes(b"\x1f\x8b\x08")
    with pytest.raises(BadInputError, match=r"a\.jsonl: is gzip"):
        texts(chat, RowSplit((file,)))


def test_rows_of_parquet_and_arrow_are_those_of_lines(tmp_path: Path) -> None:
    chat = open_tokenizer(chat_folder(tmp_path / "chat", "qwen3"))
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}
    rows = [
        [ASK, ANSWER],
        [{**ASK, "content": "hi"}, ANSWER, ASK, {**ANSWER, "content": "no"}],
        [ASK, call, ASK, ANSWER],
    ]
    columns = {"messages": rows, "source": ["a", "b", "c"]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet", row_group_size=2)
    write(tmp_path / "hf" / "train", columns)
    wanted = texts(chat, RowSplit((lines(tmp_path / "a.jsonl", *({"messages": row} for row in rows)),)))
    for split in (RowSplit((tmp_path / "a.parquet",)), RowSplit((tmp_path / "hf" / "train",))):
        assert texts(chat, split) == wanted
        assert str(tokenized(split, chat, "completions", 500).left_out[0]).startswith("3 rows with 'source'")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(BadInputError, match=r"a\.parquet: not a readable Parquet file"):
        texts(chat, RowSplit((tmp_path / "a.parquet",)))


def test_files_of_a_split(tmp_path: Path) -> None:
    def files(path: Path, held: str | None = None) -> list[Any]:
        return [([one.name for one in split.files], split.tenth) for split in splits_of(path, held)]

    for name in (
        "a/train.jsonl",
        "a/val.jsonl",
        "b/train/1.jsonl",
        "b/train/2.json",
        "b/test/1.jsonl",
        "c/x.jsonl",
    ):
        lines(tmp_path / name, TALK)
    for name in ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"):
        lines(tmp_path / "d" / "data" / f"{name}.parquet")
    assert files(tmp_path / "a") == [(["train.jsonl"], None), (["val.jsonl"], None)]
    assert files(tmp_path / "b") == [(["1.jsonl", "2.json"], None), (["1.jsonl"], None)]
    assert (
        files(tmp_path / "c")
        == files(tmp_path / "c" / "x.jsonl")
        == [(["x.jsonl"], False), (["x.jsonl"], True)]
    )
    assert [len(names) for names, _ in files(tmp_path / "d")] == [2, 1]
    for name in (
        "c/more.jsonl.gz",
        "c/.hidden",
        "a/old.jsonl",
        "a/test.jsonl",
        "d/data/extra.csv",
        "d/README.md",
    ):
        lines(tmp_path / name)
    beside = {name: splits_of(tmp_path / name, None)[0].beside for name in "abcd"}
    wanted = {"a": ("old.jsonl",), "b": (), "c": ("more.jsonl.gz",), "d": ("README.md", "extra.csv")}
    assert beside == wanted
    for name in (
        "train_sft-00000-of-00002",
        "train_sft-00001-of-00002",
        "test_sft-00000-of-00001",
        "train_gen",
    ):
        lines(tmp_path / "e" / "data" / f"{name}.parquet")
    assert [len(names) for names, _ in files(tmp_path / "e", "test_sft")] == [2, 1]
    for folder in (tmp_path / "e", tmp_path / "e" / "data"):
        with refused("data.eval_split=test_sft"):
            splits_of(folder, None)
    (tmp_path / "d" / "data" / "train-00001-of-00002.parquet").unlink()
    with pytest.raises(BadInputError, match=r"holds 1 of the 2 files train-…-of-00002; fetch the others"):
        splits_of(tmp_path / "d", None)
    lines(tmp_path / "a" / "train.parquet")
    with pytest.raises(BadInputError, match=r"train\.jsonl and train\.parquet may hold the same rows"):
        splits_of(tmp_path / "a", None)
    (tmp_path / "a" / "train.parquet").unlink()
    with pytest.raises(BadInputError, match=r"nothing to measure on: other\.jsonl"):
        splits_of(tmp_path / "a", "other")
    with pytest.raises(BadInputError, match=r"holds no \.jsonl or \.parquet"):
        splits_of(tmp_path, None)


@pytest.mark.parametrize("count", [2, 9, 10, 11, 20])
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
    for column, counts in (
        ("chosen", f"the cat{END}"),
        ("body", f"Hello{END}"),
        ("prompt", f" b{END}"),
        ("instruction", f"four!{END}"),
    ):
        assert texts(chat, RowSplit((file,), None, column)) == [counts]
    with pytest.raises(BadInputError, match=r"no 'gone', which data\.input_column names"):
        texts(chat, RowSplit((file,), None, "gone"))


def test_the_cache_is_by_content_and_a_damaged_one_is_made_anew(
    chat: Chat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = list[int]()
    real = module._made

    def counted(*arguments: Any) -> Any:
        made.append(1)
        return real(*arguments)

    monkeypatch.setattr(module, "_made", counted)
    file = lines(tmp_path / "a.jsonl", TALK, {"text": "Hello", "id": 1})
    first = tokenized(RowSplit((file,)), chat, "completions", 99)

    def again(learn: str = "completions", chat: Chat = chat, length: int = 99) -> int:
        made.clear()
        found = tokenized(RowSplit((file,)), chat, learn, length)
        if not made:
            pairs: Any = zip(first.text, found.text, strict=True)
            assert all(np.array_equal(a, b) for a, b in pairs)
            assert (first.left_out, first.notes) == (found.left_out, found.notes)
        return len(made)

    assert again() == 0
    assert again("all") == again(length=98) == 1
    assert again(chat=open_tokenizer(chat_folder(tmp_path / "chat", template=TEMPLATES["zephyr"]))) == 1
    for damage in (
        lambda data: data[:-1],
        lambda data: data[:-1] + b"\x07",
        lambda _: b"",
        lambda data: data[:9],
    ):
        for kept in (tmp_path / "cache" / "trainer" / "conversations").iterdir():
            kept.write_bytes(damage(kept.read_bytes()))
        assert again() == 1
        assert "is damaged" in capsys.readouterr().out
        assert again() == 0
    lines(file, TALK, {"text": "Hello", "id": 2}, {"text": "more"})
    assert again() == 1
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    assert again() == again() == 1, "where nothing can be kept"
