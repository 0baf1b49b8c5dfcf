"""Promise: a turn is learned as it is asked for at inference, or refused with a key that helps."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from tests.helpers.chat_folders import CHATML, TEMPLATES, chat_folder
from tests.helpers.refusals import named, refused
from trainer.data.formats.chat import Chat, ChatError, open_tokenizer
from trainer.data.formats.messages import Talk, sample_of
from trainer.data.formats.turns import Learned, counted, learned, with_stop

# What TRL 1.16.0 counts of conversations with thinking, by its template of each model, which marks turns.
# Templates here are short forms of the models' own.
FOLDER = Path(__file__).with_name("turns_by_trl")
RECORDED: dict[str, dict[str, Any]] = json.loads((FOLDER / "recorded.json").read_text())
BY_TRL, TALKS = RECORDED["counted"], RECORDED["talks"]
CASES = [(one, name) for one in BY_TRL for name in BY_TRL[one]]
WORDS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
THINKING = ("thinking", "several thinking", "inline", "tools")  # R1's prompt begins it


def talk_of(messages: list[Any], **keys: Any) -> Talk:
    sample = sample_of({"messages": messages, **keys}, "completions")
    assert isinstance(sample, Talk)
    return sample


def opened(family: str, folder: Path) -> Chat:
    """A small tokenizer with a family's tokens, and its template."""
    template = "".join((FOLDER / f"{family}.jinja").read_text().splitlines())
    bos, eos, *_ = special = RECORDED["tokens"][family]
    chat_folder(folder, template=template, bos_token=bos, eos_token=eos)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens([AddedToken(one, special=False, normalized=False) for one in WORDS])
    tokenizer.save(str(folder / "tokenizer.json"))
    return open_tokenizer(folder)


def counting(chat: Chat, sample: Learned) -> str:
    found = counted(chat, sample.text, next(chat.encode([sample.text])), sample.spans)
    assert not found.straddling and not found.unended
    return str(chat.tokenizer.decode(found.ids[found.counts].tolist(), skip_special_tokens=False))


@pytest.mark.parametrize(("family", "name"), CASES)
def test_each_turn_is_learned_as_it_is_asked_for(family: str, name: str, tmp_path: Path) -> None:
    """By what TRL's marked template of the family counts of it, but for what the prompt holds already."""
    chat, talk = opened(family, tmp_path), talk_of(TALKS[name])
    if family == "deepseek_r1_distill" and name not in THINKING:
        with refused("message 2", "reasoning_content", "language.turns=each", by=ChatError):
            list(learned(chat, talk, "completions", each=True))
        return
    samples = list(learned(chat, talk, "completions", each=True))
    assert len(samples) == len(talk.counting)
    for number, sample, theirs in zip(talk.counting, samples, BY_TRL[family][name], strict=True):
        prompt = chat.render(talk.messages[:number], generation_prompt=True)
        assert sample.text.startswith(prompt) and sample.spans == [(len(prompt), sample.spans[0][1])]
        overlap = max(length for length in range(len(theirs)) if prompt.endswith(theirs[:length]))
        assert counting(chat, sample) == theirs[overlap:].rstrip("\n")
        assert not sample.reasons


@pytest.mark.parametrize(("family", "name"), CASES)
def test_a_conversation_as_one_sample(family: str, name: str, tmp_path: Path) -> None:
    chat, talk = opened(family, tmp_path), talk_of(TALKS[name])
    try:
        (sample,) = learned(chat, talk, "completions", each=False)
    except ChatError as error:
        assert named(str(error), "language.turns=each")
        if family != "deepseek_r1_distill" or name in THINKING:
            assert list(learned(chat, talk, "completions", each=True))
        return
    unlike = 0
    each = [counting(chat, one) for one in learned(chat, talk, "completions", each=True)]
    for one, (begin, end) in zip(each, sample.spans, strict=True):
        mark = next(mark for mark in chat.ends if one.endswith(mark))  # that a conversation may lack: told
        whole = sample.text[begin:end].rstrip().removesuffix(mark)
        unlike += one.removesuffix(mark).rstrip() != whole.rstrip()
    assert sample.otherwise == unlike == (family == "qwen3" and name == "several")


def test_thinking_that_no_template_reads_is_refused_with_what_helps(tmp_path: Path) -> None:
    chat = open_tokenizer(chat_folder(tmp_path, template=CHATML))
    with refused("message 2", "content", by=ChatError) as error:
        list(learned(chat, talk_of(TALKS["thinking"]), "completions", each=False))
    assert not named(str(error.value), "language.turns=each")
    inline = talk_of(TALKS["inline"])
    for each in (False, True):
        assert all("well" in one.text for one in [*learned(chat, inline, "completions", each)][-1:])


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_key_counts_as_read_where_it_changes_what_is_learned(number: int, tmp_path: Path) -> None:
    """In what counts of its message; anywhere, of a message that doesn't count."""
    mood, marked = "{{ message.mood or '' }}", TEMPLATES["marked"]
    outside = marked.replace("{{ '' }}", mood).replace("<|im_start|>{{", mood + "<|im_start|>{{")
    messages = [dict(one) for one in TALKS["several"]]
    messages[number]["mood"] = "sad"
    talk = talk_of(messages)._replace(counting=[1])
    inside = marked.replace("<|im_end|>", mood + "<|im_end|>")
    for template, unread in ((outside, number == 1), (inside, False)):
        chat = open_tokenizer(chat_folder(tmp_path, template=template))
        (sample,) = learned(chat, talk, "completions", each=False)
        assert named(sample.reasons, "mood") == unread


def test_an_assistant_who_speaks_first_is_learned_where_the_template_has_it_or_told(tmp_path: Path) -> None:
    answer, rest = TALKS["several"][1], TALKS["several"]
    for family, greeted in (("smollm2", False), ("marked", True)):
        chat = open_tokenizer(chat_folder(tmp_path / family, family))
        for each in (False, True):
            samples = list(learned(chat, talk_of([answer, *rest]), "completions", each))
            said = "".join(counting(chat, one) for one in samples)
            assert said.count("because<|im_end|>") == 1 + greeted and said.endswith("so<|im_end|>")
            assert sum(len(one.reasons) for one in samples) == (not greeted)
            assert all("because" in one.text for one in samples)
    with refused("message 1", by=ChatError):
        list(learned(open_tokenizer(tmp_path / "smollm2"), talk_of([answer, rest[0]]), "completions", False))


def test_a_template_without_ends_is_stopped_by_the_next_turn(tmp_path: Path) -> None:
    glm, qwen = opened("glm4moe", tmp_path / "glm"), opened("qwen3", tmp_path / "qwen")
    assert glm.turn_end is None and with_stop(glm).turn_end == glm.ends["<|user|>"]
    assert with_stop(qwen).turn_end == qwen.turn_end == qwen.ends["<|im_end|>"]
    endless = chat_folder(tmp_path / "plain", template=TEMPLATES["zephyr"].replace("eos_token", "''"))
    assert with_stop(open_tokenizer(endless)).turn_end is None
