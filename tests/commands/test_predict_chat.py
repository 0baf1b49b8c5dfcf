"""Promise: a run on conversations answers what a user says, letter by letter, up to the end of its turn."""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.hf_models import NEEDS, folder_of
from tests.helpers.refused import refused
from trainer.commands.predict.text import show_text
from trainer.errors import BadInputError

pytestmark = NEEDS

END, TURN, TEMPLATE = 250, 251, 252


class Chat:
    """Bytes as tokens; a template of one line."""

    eos, turn_end = END, TEMPLATE
    asked = ""

    def render(self, messages: Sequence[dict[str, str]], generation_prompt: bool) -> str:
        assert generation_prompt
        return f"<{messages[0]['role']}>{messages[0]['content']}<assistant>"

    def encode(self, texts: Sequence[str]) -> Iterator[Any]:
        self.asked = texts[0]
        yield SimpleNamespace(ids=np.frombuffer(texts[0].encode(), np.uint8).astype(np.int64))

    @property
    def tokenizer(self) -> Any:
        return SimpleNamespace(decode=lambda tokens: bytes(tokens).decode(errors="replace"))


class Says(torch.nn.Module):
    """Says the same whatever it was asked, greedily."""

    sequence_length = 64

    def __init__(self, words: bytes, end: int) -> None:
        super().__init__()
        self.said, self.answer = 0, [*words, end]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(1, tokens.shape[1], 256)
        logits[0, -1, self.answer[self.said]] = 1.0
        self.said += 1
        return logits


def answered(model: Says, chat: Chat, folder: Path | None = None, **options: Any) -> int:
    name = "gpt" if folder is None else f"hf/{folder}"
    recipe = SimpleNamespace(model=SimpleNamespace(name=name), device="cpu")
    task = SimpleNamespace(chat=chat, describe=dict)
    run: Any = SimpleNamespace(model=model, recipe=recipe, task=task)
    given: dict[str, Any] = {
        "files": [],
        "out": None,
        "tokens": 40,
        "temperature": 0.0,
        "seed": 0,
        "tokenizer": None,
    }
    return show_text(run, argparse.Namespace(**{**given, "prompt": "why?", **options}))


@pytest.mark.parametrize("end", [END, TURN, TEMPLATE])
def test_it_answers_up_to_the_end_of_its_turn(
    end: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_of("llama", tmp_path)
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": [{END}, {TURN}]}}')
    chat = Chat()
    assert answered(Says("bécause\x1b[2J".encode(), end), chat, folder) == 0
    assert capsys.readouterr().out == "bécause\ufffd[2J\n"
    assert chat.asked == "<user>why?<assistant>"


def test_it_ends_after_so_many_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    assert answered(Says(b"and so on", END), Chat(), tokens=3) == 0
    assert capsys.readouterr().out == "and\n"


def test_nothing_said_is_one_line() -> None:
    with pytest.raises(BadInputError, match="give --prompt TEXT"):
        answered(Says(b"", END), Chat(), prompt=None)


def test_another_tokenizer_is_refused() -> None:
    with refused("conversations"):
        answered(Says(b"", END), Chat(), tokenizer="bpe:nowhere")
