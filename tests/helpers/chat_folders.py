"""Folders with a small tokenizer and the chat template of a family of models, in its public form."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

_FAMILIES = ("smollm2", "llama3", "qwen3", "mistral", "gemma", "zephyr", "phi3", "marked")


def _template(name: str) -> str:
    """A template as its model has it; but for Qwen 3's, none ends in a new line."""
    text = (Path(__file__).with_name("chat_templates") / f"{name}.jinja").read_text()
    return text if name == "qwen3" else text.removesuffix("\n")


CHATML = _template("chatml")
TEMPLATES = {name: _template(name) for name in _FAMILIES}
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
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos, "eos_token": eos}
    said["pad_token"] = eos
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
    parts = (decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(list(parts))
    special = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer.train_from_iterator([_WORDS], BpeTrainer(vocab_size=500, special_tokens=special))
    # Bytes stand in for letters that aren't known: as special tokens, the trainer's, they would be text.
    plain = json.loads(tokenizer.to_str())
    plain["added_tokens"] = plain["added_tokens"][:1]
    return Tokenizer.from_str(json.dumps(plain))
