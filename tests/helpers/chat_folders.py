# ruff: noqa: E501  (templates in their own lines)
"""Folders with a small tokenizer and the chat template of a family of models, in its public form."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' "
    "+ '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEMPLATES = {
    "smollm2": (
        "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
        "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM<|im_end|>\n' }}{% endif %}"
        "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "llama3": (
        "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = "
        "'<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + "
        "'<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}"
        "{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    ),
    "qwen3": (
        "{%- if tools %}\n    {{- '<|im_start|>system\\n# Tools\\n' }}\n    {%- for tool in tools %}\n"
        '        {{- "\\n" }}\n        {{- tool | tojson }}\n    {%- endfor %}\n'
        "    {{- '<|im_end|>\\n' }}\n{%- endif %}\n"
        "{%- set ns = namespace(last=0) %}\n{%- for message in messages %}\n"
        "    {%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}\n{%- endfor %}\n"
        "{%- for message in messages %}\n    {%- set content = message.content %}\n"
        "    {%- if message.role == 'assistant' %}\n        {%- set thought = '' %}\n"
        "        {%- if '</think>' in content %}\n"
        "            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1]"
        ".lstrip('\\n') %}\n"
        "            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}\n        {%- endif %}\n"
        "        {%- if loop.index0 > ns.last and (loop.last or thought) %}\n"
        "            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n'"
        " + content.lstrip('\\n') }}\n        {%- else %}\n"
        "            {{- '<|im_start|>' + message.role + '\\n' + content }}\n        {%- endif %}\n"
        "        {%- for call in message.tool_calls or [] %}\n"
        "            {{- '\\n<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}\n"
        "        {%- endfor %}\n"
        "        {{- '<|im_end|>\\n' }}\n    {%- elif message.role == 'tool' %}\n"
        "        {{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}\n"
        "    {%- else %}\n        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}\n"
        "    {%- endif %}\n{%- endfor %}\n"
        "{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n' }}\n{%- endif %}\n"
    ),
    "mistral": (
        "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) "
        "%}{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
        "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
        "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + eos_token}}"
        "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
    ),
    "gemma": (
        "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
        "{% endif %}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
        "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] "
        "%}{% endif %}{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
    ),
    "zephyr": (
        "{% for message in messages %}\n{% if message['role'] == 'user' %}\n"
        "{{ '<|user|>\n' + message['content'] + eos_token }}\n{% elif message['role'] == 'system' %}\n"
        "{{ '<|system|>\n' + message['content'] + eos_token }}\n{% elif message['role'] == 'assistant' %}\n"
        "{{ '<|assistant|>\n'  + message['content'] + eos_token }}\n{% endif %}\n"
        "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}"
    ),
    "phi3": (
        "{% for message in messages %}{% if message['role'] == 'system' %}"
        "{{'<|system|>\n' + message['content'] + '<|end|>\n'}}{% elif message['role'] == 'user' %}"
        "{{'<|user|>\n' + message['content'] + '<|end|>\n'}}{% elif message['role'] == 'assistant' %}"
        "{{'<|assistant|>\n' + message['content'] + '<|end|>\n'}}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
    ),
    "marked": (
        "{% for message in messages %}{% if message.role == 'assistant' %}<|im_start|>assistant\n"
        "{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}\n{{ '' }}{% else %}"
        "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
}
_SPECIAL = {
    "llama3": ("<|begin_of_text|>", "<|eot_id|>", ["<|start_header_id|>", "<|end_header_id|>"]),
    "mistral": ("<s>", "</s>", []),
    "gemma": ("<bos>", "<eos>", ["<start_of_turn>", "<end_of_turn>"]),
    "zephyr": ("<s>", "</s>", []),
    "phi3": ("<s>", "<|endoftext|>", ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]),
}
_CHATML = ("<|endoftext|>", "<|im_end|>", ["<|im_start|>"])
_SPELLED = ("mistral", "gemma", "zephyr")  # tokenizers of the SentencePiece kind
_WORDS = "the cat sat on a mat. Hello there, what is two and two? four! the answer is yes no maybe \n\n" * 4


def chat_folder(folder: Path, family: str = "smollm2", template: str | None = None, **config: Any) -> Path:
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja as a family of models has them."""
    folder.mkdir(parents=True, exist_ok=True)
    bos, eos, others = _SPECIAL.get(family, _CHATML)
    tokenizer = _spelled() if family in _SPELLED else _bytes()
    tokenizer.add_special_tokens(list(dict.fromkeys([bos, eos, *others])))
    if family in (*_SPELLED, "llama3"):
        number = tokenizer.token_to_id(bos)
        adds = processors.TemplateProcessing(single=f"{bos} $A", pair=None, special_tokens=[(bos, number)])
        blanks = [] if family in _SPELLED else [processors.ByteLevel(trim_offsets=True)]
        tokenizer.post_processor = processors.Sequence([*blanks, adds])
    tokenizer.save(str(folder / "tokenizer.json"))
    said = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
        "pad_token": eos,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps({**said, **config}))
    chosen = TEMPLATES[family] if template is None else template
    if chosen:
        (folder / "chat_template.jinja").write_text(chosen)
    return folder


def _bytes() -> Tokenizer:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([_WORDS], BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    return tokenizer


def _spelled() -> Tokenizer:
    tokenizer = Tokenizer(BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    special = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer.train_from_iterator([_WORDS], BpeTrainer(vocab_size=500, special_tokens=special))
    # Bytes stand in for letters that aren't known: as special tokens, the trainer's, they would be text.
    plain = json.loads(tokenizer.to_str())
    plain["added_tokens"] = plain["added_tokens"][:1]
    return Tokenizer.from_str(json.dumps(plain))
