"""Promise: a run on conversations answers what a user says, letter by letter, up to the end of its turn."""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.chat_folders import CHATML, chat_folder
from tests.helpers.commands import command, refuse
from tests.helpers.forked import attempt
from tests.helpers.hf_models import NEEDS, folder_of
from tests.helpers.refusals import refused
from tests.helpers.toys import make_recipe
from trainer.commands.export.hf import write_for_library
from trainer.commands.predict.text import show_text
from trainer.models.hf import HfLanguage
from trainer.observe.text import printable
from trainer.train.model_of_run import open_run

pytestmark = NEEDS
Capsys = pytest.CaptureFixture[str]
END, TURN, TEMPLATE = 250, 251, 252


class Chat:
    """Bytes as tokens; a template of one line."""

    eos, turn_end = END, TEMPLATE
    asked = ""

    def given(self, keys: Mapping[str, Any]) -> "Chat":
        assert not keys
        return self

    def render(self, messages: Sequence[dict[str, str]], tools: Any, generation_prompt: bool) -> str:
        assert generation_prompt and not tools
        return "".join(f"<{one['role']}>{one['content']}" for one in messages) + "<assistant>"

    def encode(self, texts: Sequence[str]) -> Iterator[Any]:
        self.asked = texts[0]
        yield SimpleNamespace(ids=np.frombuffer(texts[0].encode(), np.uint8).astype(np.int64))

    @property
    def tokenizer(self) -> Any:
        return SimpleNamespace(decode=lambda tokens: bytes(tokens).decode(errors="replace"))


class Says(torch.nn.Module):
    """Says the same whatever it was asked, greedily."""

    places = 64

    def __init__(self, words: bytes, end: int) -> None:
        super().__init__()
        self.said, self.answer = 0, [*words, end]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(1, tokens.shape[1], 256)
        logits[0, -1, self.answer[self.said % len(self.answer)]] = 1.0
        self.said += 1
        return logits


NONE = ("files", "out", "tokenizer", "system", "prompts")
OPTIONS: dict[str, Any] = {"tokens": 40, "temperature": 0.0, "seed": 0, "top_p": 1.0, **dict.fromkeys(NONE)}


def answered(model: Says, chat: Chat, folder: Path | None = None, **options: Any) -> int:
    name = "gpt" if folder is None else f"hf/{folder}"
    recipe = SimpleNamespace(model=SimpleNamespace(name=name), device="cpu")
    task = SimpleNamespace(chat=chat, describe=dict)
    run: Any = SimpleNamespace(model=model, recipe=recipe, task=task)
    return show_text(run, argparse.Namespace(**{**OPTIONS, "prompt": ["why?"], **options}))


@pytest.mark.parametrize("end", [END, TURN, TEMPLATE])
def test_it_answers_up_to_the_end_of_its_turn(end: int, tmp_path: Path, capsys: Capsys) -> None:
    folder = folder_of("llama", tmp_path)
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": [{END}, {TURN}]}}')
    chat = Chat()
    assert answered(Says("bécause\x1b[2J".encode(), end), chat, folder) == 0
    assert capsys.readouterr().out == "bécause\ufffd[2J\n"
    assert chat.asked == "<user>why?<assistant>"


def test_nothing_said_is_one_line(tmp_path: Path) -> None:
    (none := tmp_path / "none.txt").write_text("\n \n")
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("--prompt", {"prompt": ["why?", ""]}),
        ("--prompts", {"prompts": none}),
        ("--prompts", {"prompt": None, "prompts": none}),
        ("--top-p", {"top_p": 0.0}),
        ("conversations", {"tokenizer": "bpe:nowhere"}),
    ]
    for flag, keys in wrong:
        with refused(flag):
            answered(Says(b"", END), Chat(), **keys)


def test_several_turns_and_a_system_prompt(capsys: Capsys) -> None:
    chat = Chat()
    assert answered(Says(b"so", END), chat, prompt=["why?", "and?"], system="Be kind") == 0
    assert capsys.readouterr().out == "so\nso\n"
    assert answered(Says(b"and so on", END), Chat(), tokens=3) == 0
    assert capsys.readouterr().out == "and\n"
    assert chat.asked == "<system>Be kind<user>why?<assistant>so<user>and?<assistant>"


ROWS: list[dict[str, Any]] = [
    {"prompt": "why?"},
    {"messages": [{"role": "human", "content": "why?"}, {"role": "assistant", "content": "not read"}]},
    {"conversations": [{"from": "human", "value": "why?"}]},
    {"prompt": [{"role": "user", "content": "why?"}], "completion": "not read"},
    {"instruction": "why?", "output": "not read"},
]


@pytest.mark.parametrize(("form", "system"), [("txt", None), ("jsonl", "Be kind")])
def test_a_file_of_prompts(form: str, system: str | None, tmp_path: Path, capsys: Capsys) -> None:
    file, chat = tmp_path / f"a.{form}", Chat()
    file.write_text("why?\n" * 5 if form == "txt" else "".join(json.dumps(row) + "\n" for row in ROWS))
    assert answered(Says(b"so", END), chat, prompt=None, prompts=file, system=system) == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    wanted = [{"role": "user", "content": "why?"}]
    if system is not None:
        wanted.insert(0, {"role": "system", "content": system})
    assert answers == [{"messages": wanted, "answer": "so"}] * 5


@pytest.mark.parametrize(
    ("row", "names"),
    [
        ({"text": "a"}, "text"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, ""),
        ({"prompt": "a " * 99}, "200 64"),
        ({"messages": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]}, "--system"),
    ],
)
def test_a_row_that_cannot_be_answered_is_named_before_any_is(
    row: dict[str, Any], names: str, tmp_path: Path, capsys: Capsys
) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps(ROWS[0]) + "\n" + json.dumps(row) + "\n")
    with refused(f"{file}: line 2", *names.split()[1:]):
        answered(Says(b"so", END), Chat(), prompt=None, prompts=file, system="a" if "--" in names else None)
    assert not capsys.readouterr().out


@pytest.mark.parametrize("top_p", [0.05, 0.9, 1.0])
def test_what_is_drawn_from_is_what_transformers_draws_from(top_p: float) -> None:
    transformers = pytest.importorskip("transformers")
    from trainer.models.gpt import generated

    logits = torch.randn(50, generator=torch.Generator().manual_seed(3)) * 3

    class Fixed(torch.nn.Module):
        places = None

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return logits.expand(1, tokens.shape[1], 50)

    kept = transformers.TopPLogitsWarper(top_p=top_p)(None, logits[None])[0] if top_p < 1 else logits
    ours, random = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    drawn = generated(Fixed(), torch.zeros(1, dtype=torch.int64), 400, 1.0, ours, top_p=top_p)
    theirs = [int(torch.multinomial(kept.softmax(0), 1, generator=random)) for _ in range(400)]
    assert list(drawn) == theirs and {*theirs} <= {*kept.isfinite().nonzero().flatten().tolist()}


SHORT, LONG = 32, 96  # language.sequence_length, and the places of the models of transformers
QUESTIONS = {"short": "the cat", "long": "the cat sat on a mat " * 4}


def trained(folder: Path, family: str | None, **changed: Any) -> Path:
    """A run of one step on conversations; without a family of our own GPT."""
    chat_folder(folder / "base", template=CHATML)
    if family is not None:
        sizes = {"vocab_size": 420, "max_position_embeddings": LONG, "hidden_act": "silu"}
        folder_of(family, folder / "base", **{**sizes, **changed})
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (folder / "a.jsonl").write_text(f"{json.dumps({'messages': talk})}\n" * 12)
    own = {"tokenizer": str(folder / "base"), "layers": 1, "heads": 2, "width": 16}
    one = {"global_batch_size": 1, "micro_batch_size": 1}
    recipe = make_recipe(
        task="language",
        data={"name": "conversations", "path": str(folder / "a.jsonl"), **one},
        model={} if family is None else {"name": f"hf/{folder / 'base'}"},
        language={"sequence_length": SHORT, **(own if family is None else {})},
        optim={"lr": 1e-7},
        max_steps=1,
    )
    attempt(folder / "run", recipe, code=0)
    return folder / "run"


def generate(run: Path, prompt: str, tokens: int) -> tuple[str, int, int]:
    """What transformers makes of the exported folder, greedily; how many tokens that is, after how many."""
    import transformers

    folder = run / "out"
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    said, how = [{"role": "user", "content": prompt}], {"return_dict": True, "return_tensors": "pt"}
    asked = tokenizer.apply_chat_template(said, add_generation_prompt=True, **how)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    length = asked["input_ids"].shape[1]
    made = model.generate(**asked, max_new_tokens=tokens, do_sample=False)[0, length:].tolist()
    made = [one for one in made if one not in model.generation_config.eos_token_id]
    return tokenizer.decode(made), len(made), length


@pytest.mark.parametrize(("family", "changed"), [("mistral", {"sliding_window": 7}), ("gpt2", {})])
def test_an_answer_is_what_generate_says_of_the_exported_folder(
    family: str, changed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where question or answer are longer than the samples that were learned; to the last place."""
    run = trained(tmp_path, family, **changed)
    opened = open_run(run)
    (run / "out").mkdir()
    write_for_library("transformers", opened, opened.model, run / "out")
    asked = ["predict", run, "--temperature", 0, "--prompt"]
    for name, question in QUESTIONS.items():
        *_, length = generate(run, question, 1)
        assert length < SHORT if name == "short" else SHORT < length < LONG - 20
        for tokens, most in ((20, 20), (LONG, LONG + 1 - length))[name == "short" :]:
            wanted, count, _ = generate(run, question, most)
            with monkeypatch.context() as alone:  # a token is computed from what was kept of those before it
                alone.setattr(HfLanguage, "forward", None)
                told = command(*asked, question, "--tokens", tokens)
            assert told.out == printable(wanted) + "\n"
            assert len(told.err.splitlines()) == (count == most < tokens), "one line where places are full"
    refuse([*asked, "the cat " * LONG])


def test_our_own_gpt_answers_within_its_places(tmp_path: Path) -> None:
    """A window would take the begin of the question away, and what makes it one."""
    run = trained(tmp_path, None)
    refuse(["predict", run, "--prompt", QUESTIONS["long"]])
    told = command("predict", run, "--prompt", "a", "--tokens", 99, "--temperature", 99)
    assert len(told.err.splitlines()) == 1
