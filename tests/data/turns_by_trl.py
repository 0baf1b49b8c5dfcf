# ruff: noqa: E501, RUF001  (templates in their own lines; DeepSeek's tokens)
"""What TRL's training templates count of conversations with thinking, recorded for the fast tests.

Recorded with TRL 1.16.0, whose `trl/chat_templates` has each template as its model has it, and one whose turns are
marked. Templates here are short forms of the first.
"""

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from tests.helpers.chat_folders import chat_folder

RECORD = Path(__file__).with_suffix(".json")
_LAST = (
    "{%- set ns = namespace(asked=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.asked = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}"
)
_SPLIT = (
    "{% set thought = m.reasoning_content or '' %}{% set said = m.content %}{% if not thought and '</think>' in said %}"
    "{% set thought = said.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set said = said.split('</think>')[-1].lstrip('\n') %}{% endif %}"
)
SHORT = {
    "qwen3": _LAST
    + "{% if m.role == 'assistant' %}"
    + _SPLIT
    + "<|im_start|>assistant{{ '\n' }}{% if loop.index0 > ns.asked and (loop.last or thought) %}"
    "{{ '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}{% endif %}{{ said.lstrip('\n') }}"
    "{% for c in m.tool_calls or [] %}{{ '\n' if said or not loop.first }}<tool_call>{{ '\n{\"name\": \"' + c.function.name + '\", \"arguments\": ' }}"
    "{{ c.function.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}<|im_end|>{{ '\n' }}"
    "{% elif m.role == 'tool' %}<|im_start|>user{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}<|im_end|>{{ '\n' }}"
    "{% else %}<|im_start|>{{ m.role + '\n' + m.content }}<|im_end|>{{ '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{{ '\n' }}{% if enable_thinking is defined and not enable_thinking %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}",
    "deepseek_r1_distill": "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<｜User｜>' + m.content }}{% elif m.role == 'assistant' %}"
    "{{ '<｜Assistant｜>' + m.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}",
    "glm4moe": "[gMASK]<sop>"
    + _LAST
    + "{% if m.role == 'assistant' %}"
    + _SPLIT
    + "{{ '\n' * (loop.index0 == -1) }}<|assistant|>{{ '\n<think>' + (thought.strip() if loop.index0 > ns.asked else '') + '</think>' }}"
    "{{ '\n' + said.strip() if said.strip() else '' }}{% for c in m.tool_calls or [] %}{{ '\n<tool_call>' + c.function.name + '\n' }}"
    "{% for k, v in c.function.arguments.items() %}{{ '<arg_key>' + k + '</arg_key>\n<arg_value>' }}{{ v if v is string else v | tojson }}"
    "{{ '</arg_value>\n' }}{% endfor %}{{ '</tool_call>' }}{% endfor %}"
    "{% elif m.role == 'tool' %}<|observation|>{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% else %}<|{{ m.role }}|>{{ '\n' + m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "gptoss": "<|end|>{% for m in messages %}{% set ends = loop.last and not add_generation_prompt %}{% if m.role == 'assistant' %}"
    "{% set later = messages[loop.index:] | selectattr('role', 'equalto', 'assistant') | rejectattr('tool_calls') | list %}"
    "{% if m.tool_calls %}{% if m.thinking and not later %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary json<|message|>"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>{% else %}"
    "{% if m.thinking and ends %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}{{ '<|return|>' if ends else '<|end|>' }}{% endif %}"
    "{% elif m.role == 'tool' %}<|start|>functions.add to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>"
    "{% elif m.role == 'user' %}<|start|>user<|message|>{{ m.content }}<|end|>{% else %}<|start|>developer<|message|># Instructions"
    "{{ '\n\n' + m.content + '\n\n' }}<|end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}",
}
_TOKENS = {
    "qwen3": ("<|im_start|>", "<|im_end|>"),
    "deepseek_r1_distill": (
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        "<｜User｜>",
        "<｜Assistant｜>",
    ),
    "glm4moe": (
        "[gMASK]",
        "<|endoftext|>",
        "<sop>",
        *(f"<|{one}|>" for one in ("system", "user", "assistant", "observation")),
    ),
    "gptoss": (
        "<|start|>",
        "<|return|>",
        *(f"<|{one}|>" for one in ("end", "message", "channel", "call", "constrain")),
    ),
}
_WORDS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


def _said(content: str, thought: str = "") -> dict[str, Any]:
    said = {"role": "assistant", "content": content}
    return {**said, "reasoning_content": thought} if thought else said


_ASK, _AGAIN, _KIND = (
    {"role": "user", "content": "why"},
    {"role": "user", "content": "and"},
    {"role": "system", "content": "be kind"},
)
_CALL: dict[str, Any] = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TALKS: dict[str, list[Any]] = {
    "single": [_ASK, _said("because")],
    "thinking": [_ASK, _said("because", "hm")],
    "several": [_ASK, _said("because"), _AGAIN, _said("so")],
    "several thinking": [_KIND, _ASK, _said("because", "hm"), _AGAIN, _said("so", "well")],
    "inline": [
        _ASK,
        _said("<think>\nhm\n</think>\n\nbecause"),
        _AGAIN,
        _said("<think>\nwell\n</think>\n\nso"),
    ],
    "tools": [
        _ASK,
        {**_said("", "hm"), "tool_calls": [_CALL]},
        {"role": "tool", "content": "4"},
        _said("four", "well"),
    ],
}


def folder_of(family: str, template: str, folder: Path) -> Path:
    """A small tokenizer with a family's tokens, and a template."""
    bos, eos, *_ = _TOKENS[family]
    chat_folder(folder, template=template, bos_token=bos, eos_token=eos)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(list(_TOKENS[family]))
    tokenizer.add_tokens([AddedToken(one, special=False, normalized=False) for one in _WORDS])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
