"""Promise: conversations become the tokens that transformers makes of them; what assistants wrote counts."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.chat_folders import CHATML, TEMPLATES, chat_folder
from trainer.data.formats.chat import Chat, ChatError, open_tokenizer
from trainer.data.formats.messages import Talk, sample_of
from trainer.data.formats.turns import counted, turns
from trainer.errors import BadInputError

TALK = [
    {"role": "user", "content": "Hello there 😀"},
    {"role": "assistant", "content": "the cat\n\nsat  "},
    {"role": "user", "content": " what is\r\nit"},
    {"role": "assistant", "content": "naïve 🐈‍⬛ four!"},
]


def counting(chat: Chat, messages: list[Any], numbers: list[int], tools: Any = None) -> str:
    """What counts, turns apart by |, each token as its own text."""
    text, spans = turns(chat, messages, numbers, tools)
    found = counted(chat, text, next(chat.encode([text])), spans)
    assert not found.straddling
    parts, run = list[str](), list[int]()
    for number, counts in [*zip(found.ids.tolist(), found.counts.tolist(), strict=True), (0, False)]:
        if counts:
            run.append(number)
        elif run:
            parts.append(chat.tokenizer.decode(run, skip_special_tokens=False))
            run = []
    return "|".join(parts)


@pytest.mark.parametrize("family", TEMPLATES)
def test_text_and_tokens_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    chat = open_tokenizer(chat_folder(tmp_path, family))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for messages in (TALK, TALK[:2], TALK[:3]):
        for prompt in (False, True):
            text = chat.render(messages, generation_prompt=prompt)
            keys = {"add_generation_prompt": prompt}
            assert text == theirs.apply_chat_template(messages, tokenize=False, **keys)
            ids = next(chat.encode([text])).ids.tolist()
            assert ids == theirs.apply_chat_template(messages, return_dict=False, **keys), "no second BOS"
    if family == "marked":
        made = theirs.apply_chat_template(TALK, return_dict=True, return_assistant_tokens_mask=True)
        text, spans = turns(chat, TALK, [1, 3])
        assert counted(chat, text, next(chat.encode([text])), spans).counts.tolist() == [
            one == 1 for one in made["assistant_masks"]
        ]


ENDS = {"llama3": "<|eot_id|>", "mistral": "</s>", "gemma": "<end_of_turn>", "zephyr": "</s>"}


@pytest.mark.parametrize("family", TEMPLATES)
def test_what_the_assistant_wrote_counts_with_its_end(family: str, tmp_path: Path) -> None:
    chat = open_tokenizer(chat_folder(tmp_path, family))
    end = {**ENDS, "phi3": "<|end|>"}.get(family, "<|im_end|>")
    first = TALK[1]["content"].rstrip() if family in ("llama3", "gemma") else TALK[1]["content"]
    thought = "<think>\n\n</think>\n\n" * (family == "qwen3")
    last = f"{thought}{TALK[3]['content']}{end}" + "\n<|endoftext|>" * (family == "phi3")
    assert counting(chat, TALK, [1, 3]) == f"{first}{end}|{last}"
    assert counting(chat, TALK, [3]) == last


def test_thinking_that_a_template_takes_out_is_not_learned_at_a_wrong_place(tmp_path: Path) -> None:
    chat = open_tokenizer(chat_folder(tmp_path, "qwen3"))
    talk = [dict(one) for one in TALK]
    talk[1]["content"], talk[3]["content"] = "<think>\nhm\n</think>\n\nyes", "<think>\nso\n</think>\n\nno"
    assert counting(chat, talk, [3]) == "<think>\nso\n</think>\n\nno<|im_end|>"
    with pytest.raises(ChatError, match=r"changes message 2 by what follows it.*language\.learn=last"):
        turns(chat, talk, [1, 3])


def test_tools_and_their_answers(tmp_path: Path) -> None:
    chat = open_tokenizer(chat_folder(tmp_path, "qwen3"))
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": "é", "b": 2}}}
    talk = [
        {"role": "user", "content": "two and two?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "four"},
    ]
    tools = [{"type": "function", "function": {"name": "add"}}]
    said = counting(chat, talk, [1, 3], tools)
    call_text = '\n<tool_call>\n{"name": "add", "arguments": {"a": "é", "b": 2}}\n</tool_call><|im_end|>'
    assert said == f"{call_text}|<think>\n\n</think>\n\nfour<|im_end|>"


@pytest.mark.parametrize(
    "template",
    [
        "{{ call.function | tojson }}",  # a string would be quoted again
        '{{ \'{"name": "add", "arguments": \' + call.function.arguments + \'}\' }}',
        '{{ \'{"name": "add", "arguments": \' ~ call.function.arguments ~ \'}\' }}',
        "{% set said = call.function.arguments %}"
        '{{ \'{"name": "add", "arguments": \' ~ (said if said is string else said | tojson) ~ \'}\' }}',
    ],
)
def test_arguments_of_a_call_become_json_once(template: str, tmp_path: Path) -> None:
    """However a template puts them into text, and whether a row has them as an object or as JSON."""
    calls = "{% for call in message.tool_calls or [] %}" + template + "{% endfor %}"
    chat = open_tokenizer(
        chat_folder(tmp_path, template=CHATML.replace("+ '<|im_end|>'", "}}" + calls + "{{'<|im_end|>'"))
    )
    for arguments in ({"a": "é", "b": 2}, '{"a": "é", "b": 2}'):
        call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
        asked = {"role": "assistant", "content": "", "tool_calls": [call]}
        sample = sample_of({"messages": [TALK[0], asked, *TALK[:2]]}, "completions")
        assert isinstance(sample, Talk)
        said = counting(chat, list(sample.messages), [1])
        assert said == '{"name": "add", "arguments": {"a": "é", "b": 2}}<|im_end|>'


@pytest.mark.parametrize(
    ("family", "messages", "says"),
    [
        ("gemma", [{"role": "system", "content": "Be kind"}, *TALK], "System role not supported"),
        ("mistral", [*TALK[:2], TALK[3]], "roles must alternate"),
        (
            "zephyr",
            [*TALK[:3], {"role": "tool", "content": "4"}, TALK[3]],
            "leaves message 4 .role 'tool'. out",
        ),
    ],
)
def test_what_a_template_refuses_or_drops(family: str, messages: Any, says: str, tmp_path: Path) -> None:
    chat = open_tokenizer(chat_folder(tmp_path, family))
    with pytest.raises(ChatError, match=says):
        turns(chat, messages, [])


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ messages[0].__class__.__mro__ }}", "refuses it .*unsafe"),
        ("{% set n = namespace() %}{% set n.__class__ = 1 %}", "underscore"),
        ("{{ messages.append(1) }}", "refuses it .*unsafe"),
        ("{{ nothing.there }}", "refuses it .*undefined"),
        ("{% for m in messages %}{{ m.content }}{{ m.gone }}", "none that jinja2 reads"),
        ("{% for m in messages[-1:] %}{{ m.content }}{% endfor %}", "leaves message 1"),
        (
            "{% for m in messages|reverse %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
            "before message 2 otherwise",
        ),
        (
            "{% generation %}{% for m in messages %}{{ m.content }}{% endfor %}{% endgeneration %}",
            "marks 1 turns",
        ),
    ],
)
def test_a_template_that_is_odd(template: str, says: str, tmp_path: Path) -> None:
    with pytest.raises((ChatError, BadInputError), match=says):
        turns(open_tokenizer(chat_folder(tmp_path, template=template)), TALK, [1, 3])


def test_a_template_is_told_the_same_date_every_day(tmp_path: Path) -> None:
    template = "{{ strftime_now('%d %b %Y') }}\n" + CHATML
    chat = open_tokenizer(chat_folder(tmp_path, template=template))
    assert chat.asks_date
    assert chat.render(TALK).startswith("26 Jul 2024\n")


def test_templates_by_name(tmp_path: Path) -> None:
    both = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    chat = open_tokenizer(chat_folder(tmp_path, template="", chat_template=both))
    assert (chat.render(TALK), chat.render(TALK, [{"name": "f"}])) == ("plain", "tools")
    assert open_tokenizer(chat_folder(tmp_path, chat_template=both)).render(TALK).startswith("<|im_start|>")


def test_a_token_that_is_partly_prompt_does_not_count(tmp_path: Path) -> None:
    chat = open_tokenizer(chat_folder(tmp_path))
    encoded = next(chat.encode(["Hello the cat"]))
    found = counted(chat, "Hello the cat", encoded, [(7, 13)])  # within " the"
    assert found.straddling == 1
    assert chat.tokenizer.decode(found.ids[found.counts].tolist()) == " cat"


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("tokenizer.json", None, "no tokenizer.json"),
        ("tokenizer.json", "{}", "not a tokenizer.json"),
        ("tokenizer_config.json", "{", "tokenizer_config.json: not JSON"),
        ("tokenizer_config.json", "[]", "isn't a JSON object"),
        (
            "tokenizer_config.json",
            '{"eos_token": "<none>"}',
            "eos_token '<none>', which tokenizer.json doesn't",
        ),
        ("tokenizer_config.json", '{"chat_template": 3}', "chat_template is no text"),
        (
            "tokenizer_config.json",
            json.dumps({"added_tokens_decoder": {"7": {"content": "<extra>"}}}),
            "token 7 is '<extra>', and tokenizer.json doesn't",
        ),
        ("chat_template.jinja", "\udcff", "not UTF-8"),
    ],
)
def test_a_folder_that_is_odd(name: str, content: str | None, says: str, tmp_path: Path) -> None:
    folder = chat_folder(tmp_path, template="" if "template" in (content or "") else None)
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content, errors="surrogateescape")
    with pytest.raises(BadInputError, match=says) as error:
        open_tokenizer(folder)
    assert "\n" not in str(error.value)
