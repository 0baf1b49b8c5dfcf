"""Promise: conversations become the tokens that transformers makes of them; what assistants wrote counts."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from tests.helpers.chat_folders import CHATML, TEMPLATES, chat_folder
from tests.helpers.refusals import named, refused
from trainer.data.formats.chat import Chat, ChatError, open_tokenizer
from trainer.data.formats.messages import Talk, sample_of
from trainer.data.formats.turns import Learned, counted, learned, turns, unread_keys, with_stop
from trainer.errors import BadInputError

TALK = [
    {"role": "user", "content": "Hello there 😀"},
    {"role": "assistant", "content": "the cat\n\nsat  "},
    {"role": "user", "content": " what is\r\nit"},
    {"role": "assistant", "content": "naïve 🐈‍⬛ four!"},
]


def add(folder: Path, special: bool, **tokens: dict[str, bool]) -> None:
    """Adds tokens to a folder's tokenizer, or changes how they take blanks."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    added = [AddedToken(text, special=special, normalized=False, **keys) for text, keys in tokens.items()]
    (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
    tokenizer.save(str(folder / "tokenizer.json"))


def all_of(chat: Chat, messages: list[Any], numbers: list[int], tools: Any = None) -> tuple[str, int]:
    """What counts, turns apart by |, each token as its own text; and turns without an end."""
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
    return "|".join(parts), found.unended


def chat_by(folder: Path, template: str) -> Chat:
    return open_tokenizer(chat_folder(folder, template=template))


def unread_of(chat: Chat, messages: list[Any], numbers: list[int]) -> list[str]:
    text, spans = turns(chat, messages, numbers)
    return list(unread_keys(chat, Talk(messages, numbers), text, spans))


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
        counts = counted(chat, text, next(chat.encode([text])), spans).counts.tolist()
        assert counts == [one == 1 for one in made["assistant_masks"]]


ENDS = {"llama3": "<|eot_id|>", "gemma": "<end_of_turn>", "phi3": "<|end|>"}


def test_templates_by_name_are_those_of_the_configuration(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sources = {"default": TEMPLATES["smollm2"], "tool_use": "{{ messages[0].content }} {{ tools | length }}"}
    said = [{"name": name, "template": source} for name, source in sources.items()]
    chat = open_tokenizer(chat_folder(tmp_path, template="", chat_template=said))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for tools in (None, [{"type": "function", "function": {"name": "f"}}]):
        wanted = theirs.apply_chat_template(TALK, tools=tools, tokenize=False)
        assert chat.render(TALK, tools=tools) == wanted


@pytest.mark.parametrize("family", TEMPLATES)
def test_what_the_assistant_wrote_counts_with_its_end(family: str, tmp_path: Path) -> None:
    chat = open_tokenizer(chat_folder(tmp_path, family))
    end = "</s>" if family in ("mistral", "zephyr") else ENDS.get(family, "<|im_end|>")
    first = TALK[1]["content"].rstrip() if family in ("llama3", "gemma") else TALK[1]["content"]
    thought = "<think>\n\n</think>\n\n" * (family == "qwen3")
    last = f"{thought}{TALK[3]['content']}{end}" + "\n<|endoftext|>" * (family == "phi3")
    assert all_of(chat, TALK, [1, 3])[0] == f"{first}{end}|{last}"
    assert all_of(chat, TALK, [3])[0] == last


@pytest.mark.parametrize(
    ("family", "tokens", "said", "end"),
    [
        ("gemma", ["\n", "\n\n", "<b>", "</table>"], "a\n\n<b></table>", "<end_of_turn>"),
        ("smollm2", ["<|im_end|>>", "</tool_call>"], "a </tool_call>", "<|im_end|>"),
        ("smollm2", ["</table>", "\n"], "a</table>", ""),
    ],
)
def test_added_words_end_no_turn(family: str, tokens: list[str], said: str, end: str, tmp_path: Path) -> None:
    unended = "{% for m in messages %}{{ m.role + ' ' + m.content + '\n' }}{% endfor %}"
    folder = chat_folder(tmp_path, family, None if end else unended)
    add(folder, special=False, **{key: {} for key in tokens})
    chat = open_tokenizer(folder)
    assert not set(tokens) & set(chat.ends)
    talk = [TALK[0], {"role": "assistant", "content": said}, *TALK[2:]]
    if not end:  # the generation prompt is what the template writes before each answer
        talk, said = talk[:2], f"assistant {said}\n"
    assert all_of(chat, talk, [1]) == (f"{said}{end}", not end)
    assert chat.turn_end == (chat.ends[end] if end else None)


@pytest.mark.parametrize("family", ["marked", "qwen3"])
@pytest.mark.parametrize("keys", [{"rstrip": True}, {"lstrip": True}, {"single_word": True}])
def test_an_end_that_takes_blanks_counts(family: str, keys: dict[str, bool], tmp_path: Path) -> None:
    folder = chat_folder(tmp_path, family)
    add(folder, special=True, **{"<|im_end|>": keys})
    said, unended = all_of(open_tokenizer(folder), TALK, [1, 3])
    assert said.count("<|im_end|>") == 2 and unended == 0


def test_each_call_of_a_tool_is_in_the_text(tmp_path: Path) -> None:
    chat = chat_by(tmp_path, calling("{{ (message.tool_calls or [{}])[0] | tojson }}"))
    calls = [{"function": {"name": name, "arguments": {}}} for name in "ab"]
    talks = [[TALK[0], {**ASKED, "tool_calls": calls[:many]}, *TALK[2:]] for many in (1, 2)]
    assert unread_of(chat, talks[0], [1]) == []
    with refused("tool_calls", "call 2", "message 2", by=ChatError):
        unread_of(chat, talks[1], [1])


ASKED: dict[str, Any] = {"role": "assistant", "content": ""}
SAID = "{{ m.content }}<|im_end|>\n"
THOUGHT = "{{ '<think>' + m.reasoning_content + '</think>' if m.reasoning_content else '' }}"
LAST = "{{ '<think>' + m.reasoning_content|trim + '</think>' if loop.last and m.reasoning_content else '' }}"
MARKS = "{% generation %}", "{% endgeneration %}"


def thinking(said: str, prompt: str = "") -> str:
    """A template of ChatML that writes `said` of each message."""
    begin = "{% for m in messages %}<|im_start|>{{ m.role + '\n' }}"
    end = f"{{% if add_generation_prompt %}}<|im_start|>assistant\n{prompt}{{% endif %}}"
    return f"{begin}{said}{{% endfor %}}{end}"


MARKED = f"{{% if m.role == 'assistant' %}}{THOUGHT}{MARKS[0]}{SAID}{MARKS[1]}{{% else %}}{SAID}{{% endif %}}"
WITHIN = MARKED.replace(THOUGHT + MARKS[0], MARKS[0] + THOUGHT)
ANSWER_ALONE = WITHIN.replace(THOUGHT, "").replace("m.content }}", "m.content.split('</think>')[-1] }}", 1)


@pytest.mark.parametrize(
    ("said", "keys", "refused"),
    [
        (THOUGHT + SAID, {}, ()),
        (LAST + SAID, {}, (1,)),  # as Qwen 3's
        (SAID, {}, (1, 3)),
        (THOUGHT.replace("m.reasoning_content +", "m.reasoning_content[:2] +") + SAID, {}, (1, 3)),
        (WITHIN, {}, ()),
        (MARKED, {}, (1, 3)),  # the answer alone counts
        (ANSWER_ALONE, {"inline": True}, (1, 3)),
        (SAID, {"inline": True}, ()),
        (SAID, {"prompt": "<think>", "inline": True}, ()),
    ],
)
@pytest.mark.parametrize(
    ("words", "learn"), [(("one thing", "yes"), "last"), (("yes", "yes"), "completions"), (("a", "b"), "all")]
)
def test_thinking_is_learned_with_its_answer(
    said: str, keys: dict[str, Any], refused: tuple[int, ...], words: Any, learn: str, tmp_path: Path
) -> None:
    chat = chat_by(tmp_path, thinking(said, keys.get("prompt", "")))
    thought, answer = words
    answers: dict[str, Any] = {"role": "assistant", "content": answer, "reasoning_content": f"{thought}\n"}
    if keys.get("inline"):
        answers = {"role": "assistant", "content": f"<think>\n{thought}</think>\n{answer}"}
    talk = sample_of({"messages": [{"role": "user", "content": answer}, answers] * 2}, learn)
    assert isinstance(talk, Talk) and talk.counting == ([3] if learn == "last" else [1, 3])

    counts_outside = learn == "all" and said == MARKED
    fails = not counts_outside and set(refused) & set(talk.counting)
    with pytest.raises(ChatError) if fails else nullcontext():
        text, spans = turns(chat, talk.messages, talk.counting, None)
        unread = list(unread_keys(chat, talk, text, [(0, len(text))] if learn == "all" else spans))
        wanted = "'reasoning_content' in messages that don't count"
        assert unread == [wanted] * (1 in refused and learn == "last")


@pytest.mark.parametrize(
    ("said", "left_out", "unread"),
    [
        ("{{ m.tool_calls | tojson if m.tool_calls else '' }}", "", []),
        ("{% for c in m.tool_calls or () %}{{c.function|tojson}}{% endfor %}", "", ["'id' in tool_calls"]),
        ("{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}", "arguments", []),
        ("{{ m.tool_calls[0].function | tojson if m.tool_calls and loop.last else '' }}", "tool_calls", []),
    ],
)
def test_each_part_of_a_call_is_learned(said: str, left_out: str, unread: list[str], tmp_path: Path) -> None:
    chat = chat_by(tmp_path, thinking(SAID.replace("<|im_end|>", said + "<|im_end|>")))
    call = {"type": "function", "id": "c1", "function": {"name": "add", "arguments": {"a": 1}}}
    asked = {"role": "assistant", "content": "so", "tool_calls": [call]}
    with refused("tool_calls", left_out, by=ChatError) if left_out else nullcontext():
        assert unread_of(chat, [TALK[0], asked, TALK[2], asked], [1, 3]) == unread


def calling(call: str) -> str:
    """A template that writes this before the end of a turn."""
    return CHATML.replace("+ '<|im_end|>'", "}}" + call + "{{'<|im_end|>'")


@pytest.mark.parametrize(
    "said",
    [
        "{{ call.function | tojson }}",  # a string would be quoted again
        '{{ \'{"name": "add", "arguments": \' + call.function.arguments + \'}\' }}',
        "{% set said = call.function.arguments %}"
        '{{ \'{"name": "add", "arguments": \' ~ (said if said is string else said | tojson) ~ \'}\' }}',
    ],
)
def test_arguments_of_a_call_become_json_once(said: str, tmp_path: Path) -> None:
    chat = chat_by(tmp_path, calling("{% for call in message.tool_calls or [] %}" + said + "{% endfor %}"))
    for arguments in ({"a": "é", "b": 2}, '{"a": "é", "b": 2}'):
        calls = [{"type": "function", "function": {"name": "add", "arguments": arguments}}]
        asked = {**ASKED, "tool_calls": calls}
        sample = sample_of({"messages": [TALK[0], asked, *TALK[:2]]}, "completions")
        assert isinstance(sample, Talk)
        wanted = '{"name": "add", "arguments": {"a": "é", "b": 2}}<|im_end|>'
        assert all_of(chat, list(sample.messages), [1])[0] == wanted


def test_what_a_template_refuses_or_drops(tmp_path: Path) -> None:
    with refused("System", by=ChatError):
        system = {"role": "system", "content": "Be kind"}
        turns(open_tokenizer(chat_folder(tmp_path, "gemma")), [system, *TALK], [])
    with refused("message 4 'tool'", by=ChatError):
        answer = {"role": "tool", "content": "4"}
        turns(open_tokenizer(chat_folder(tmp_path, "zephyr")), [*TALK[:3], answer, TALK[3]], [])


EACH = "{% for m in messages %}{{ m.content }}"


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ messages[0].__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        (EACH + "{{ m.gone }}", "jinja2"),
        ("{% for m in messages[-1:] %}{{ m.content }}{% endfor %}", "message 1"),
        ("{% for m in messages|reverse %}{{ m.role }}: {{ m.content }}\n{% endfor %}", "message 2"),
        (EACH.replace("%}", "%}" + MARKS[0], 1) + MARKS[1] + "{% endfor %}", "generation"),
        (EACH + "{% if loop.last %}" + MARKS[0] + "." + MARKS[1] + "{% endif %}{% endfor %}", "1 turns"),
    ],
)
def test_a_template_that_is_odd(template: str, says: str, tmp_path: Path) -> None:
    with pytest.raises((ChatError, BadInputError)) as raised:
        turns(chat_by(tmp_path, template), TALK, [1, 3])
    assert named(str(raised.value), says)


def test_a_template_is_told_the_same_date_every_day(tmp_path: Path) -> None:
    chat = chat_by(tmp_path, "{{ strftime_now('%d %b %Y') }}\n" + CHATML)
    assert chat.asks_date and chat.render(TALK).startswith("26 Jul 2024\n")


def test_a_token_that_is_partly_prompt_does_not_count(tmp_path: Path) -> None:
    chat = open_tokenizer(chat_folder(tmp_path))
    found = counted(chat, "Hello the cat", next(chat.encode(["Hello the cat"])), [(7, 13)])  # within " the"
    assert found.straddling == 1
    assert chat.tokenizer.decode(found.ids[found.counts].tolist()) == " cat"


@pytest.mark.parametrize("family", ["gemma", "smollm2"])
@pytest.mark.parametrize("config", [{}, *({f"add_{a}os_token": True} for a in "be"), {"bos_token": None}])
def test_a_text_begins_as_transformers_begins_it(family: str, config: dict[str, Any], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    chat = open_tokenizer(chat_folder(tmp_path, family, **config))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)("the cat")["input_ids"]
    ours = next(chat.encode(["the cat"])).ids.tolist()
    if theirs[-1] == chat.eos:
        theirs = theirs[:-1]
    assert theirs == ([] if chat.bos is None else [chat.bos]) + ours


DROPOUT = '{"model": {"type": "BPE", "dropout": 0.1, "vocab": {}, "merges": []}}'


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("tokenizer_config.json", '{"split_special_tokens": true}', "split_special_tokens"),
        ("tokenizer.json", None, "tokenizer.json"),
        ("tokenizer.json", "{}", "tokenizer.json"),
        ("tokenizer.json", DROPOUT, "dropout 0.1"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json: JSON"),
        ("tokenizer_config.json", '{"eos_token": "<none>"}', "eos_token '<none>' tokenizer.json"),
        ("tokenizer_config.json", '{"chat_template": 3}', "chat_template"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"7": {"content": "<x>"}}}', "7 '<x>'"),
        ("chat_template.jinja", "\udcff", "UTF-8"),
    ],
)
def test_a_folder_that_is_odd(name: str, content: str | None, says: str, tmp_path: Path) -> None:
    folder = chat_folder(tmp_path, template="" if "template" in (content or "") else None)
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content, errors="surrogateescape")
    with refused(says):
        open_tokenizer(folder)


MARKED_BY_ROLES = (  # as GLM's: no end of a turn, the next role's token follows; the last one is thought over
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + '<think>' * (loop.last and m.role == 'assistant') + "
    "m.content }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
ENDED_TWICE = (  # as Cohere's
    "{% for m in messages %}{{ '<|' + m.role + '|>' + '<think>' * (loop.last and m.role == 'assistant') + "
    "m.content + '<|answered|> <|turn|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# As in the first ChatML templates of Qwen 1.5: the text of the last turn holds no end.
FOLLOWED = "}}{% if (loop.last and add_generation_prompt) or not loop.last %}<|im_end|>\n{{ '' }}{% endif %}"
FOLLOWED = CHATML.replace(" + '<|im_end|>' + '\n'}}", FOLLOWED)
LONGER = TEMPLATES["qwen3"].replace("<|im_end|>", "<|im_end|>>")
TWO = "<|answered|> <|turn|>"
_SAYS = MARKS[0] + "{{ message.content }}"
IN_BLOCKS = TEMPLATES["marked"].replace(_SAYS, _SAYS + MARKS[1] + MARKS[0])
# Each call has an end, and a turn is written otherwise where it is the last one.
EACH_CALL = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{{ '<think></think>' * (loop.last and m.role == 'assistant') + m.content }}"
    "{% for call in m.tool_calls or [{'function': {'name': ''}}] %}{{ call.function.name }}<|im_end|>"
    "{% endfor %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{{ '\n' }}{% endif %}"
)
FIRST, LAST_ONE = TALK[1]["content"], TALK[3]["content"]
CALLS: list[Any] = [{"function": {"name": name, "arguments": {}}} for name in ("add", "take")]
CALLED = [TALK[0], {**ASKED, "tool_calls": CALLS}, *TALK[:2]]
ENDED: dict[str, tuple[str, str, list[Any], list[int], str, int]] = {
    "roles": ("smollm2", MARKED_BY_ROLES, TALK, [1, 3], f"{FIRST}|<think>{LAST_ONE}", 2),
    "twice": ("smollm2", ENDED_TWICE, TALK, [1, 3], f"{FIRST}{TWO}|<think>{LAST_ONE}{TWO}", 0),
    "where another follows": ("smollm2", FOLLOWED, TALK, [1, 3], f"{FIRST}<|im_end|>|{LAST_ONE}", 1),
    # As the library finds tokens; in a turn whose end is found by a probe.
    "the longest of two": ("qwen3", LONGER, TALK, [1], f"{FIRST}<|im_end|>>", 0),
    "several calls": ("smollm2", EACH_CALL, CALLED, [1], "add<|im_end|>take<|im_end|>", 0),
    # Of two blocks a turn, of which the first has no end.
    "several blocks": ("marked", IN_BLOCKS, TALK, [1, 3], f"{FIRST}<|im_end|>|{LAST_ONE}<|im_end|>", 2),
}


@pytest.mark.parametrize("name", ENDED)
def test_the_end_of_a_turn_is_its_own_and_whole(name: str, tmp_path: Path) -> None:
    family, template, talk, numbers, said, unended = ENDED[name]
    folder = chat_folder(tmp_path, family, template)
    special = ["<|im_end|>>"] * (family == "qwen3")
    special += [f"<|{one}|>" for one in ("user", "assistant", "answered", "turn")] * (family == "smollm2")
    add(folder, special=True, **{key: {} for key in special})
    chat = open_tokenizer(folder)
    assert all_of(chat, talk, numbers) == (said, unended)
    if name in ("roles", "twice"):
        assert chat.turn_end == chat.ends.get("<|turn|>" * (name == "twice"))
    if name == "several blocks":
        with refused("4", by=ChatError):
            turns(chat, talk, [3])


def test_thinking_that_a_template_takes_out_is_not_learned_at_a_wrong_place(tmp_path: Path) -> None:
    chat = open_tokenizer(chat_folder(tmp_path, "qwen3"))
    talk = [dict(one) for one in TALK]
    talk[1]["content"], talk[3]["content"] = "<think>\nhm\n</think>\n\nyes", "<think>\nso\n</think>\n\nno"
    assert all_of(chat, talk, [3])[0] == "<think>\nso\n</think>\n\nno<|im_end|>"
    with refused("message 2", by=ChatError):
        turns(chat, talk, [1, 3])


def test_a_key_that_is_read_in_one_message_is_counted_for_the_others(tmp_path: Path) -> None:
    chat = chat_by(tmp_path, thinking(SAID.replace("<|im", "{{ m.name if loop.first else '' }}<|im")))
    first, second = {**TALK[0], "name": "Al"}, {**TALK[2], "name": "Bo"}
    assert unread_of(chat, [first, TALK[1]], [1]) == []
    assert unread_of(chat, [first, TALK[1], second, TALK[3]], [1]) == ["'name' in messages"]


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
    add(folder, special=True, **{key: {} for key in special})
    add(folder, special=False, **{key: {} for key in WORDS})
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
