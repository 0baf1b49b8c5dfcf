"""Promise: `trainer data show` prints samples as the model sees them, with the tokens that count marked."""

import json
from pathlib import Path

import pytest

from tests.helpers.chat_folders import chat_folder
from tests.helpers.commands import command
from tests.helpers.refusals import named


@pytest.mark.parametrize("text", ["packed", "padded"])
def test_samples_show_what_counts(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    said = [{"role": "user", "content": "Hello 😀"}, {"role": "assistant", "content": "the cat\x1b[2J 🐈"}]
    rows = [json.dumps(row) for row in ({"messages": said}, {"text": " yes no"}, {"messages": said[:1]})]
    for name in ("train", "val"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    (tmp_path / "recipe.yaml").write_text(
        f"task: language\nepochs: 1\ndata: {{name: conversations, path: {tmp_path}}}\n"
        f"language: {{tokenizer: {chat_folder(tmp_path / 'chat', 'mistral')}, sequence_length: 400}}\n"
    )
    shown = command("data", "show", tmp_path / "recipe.yaml", "--set", f"language.text={text}").out
    assert "<s> [INST] Hello 😀 [/INST]⟦ the cat\ufffd[2J 🐈</s>⟧" in shown
    assert "<s>⟦  yes no</s>⟧" in shown
    assert "training data: left out: 1 conversation without an assistant turn" in shown
    assert "2 rows of" in shown
    assert shown.count("--\n") == 2


def test_other_text_is_shown() -> None:
    assert named(command("data", "show", "gpt-stdlib", "--samples", 1).out, "257 256")
