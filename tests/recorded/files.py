"""The files that random recipes name: small data sets, a language model, tasks and a hook."""

import importlib.util
import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np

_WORDS = ["the", "cat", "sat", "on", "a", "mat", "what", "is", "two", "and", "four", "yes", "no", "maybe"]


def left_out(kind: str) -> str:
    """Returns why recipes of a kind can't be played in this environment; "" if they can."""
    needed = ("transformers", "tokenizers") if kind == "conversations" else ()
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    return f"{', '.join(missing)} isn't installed" if missing else ""


def write_files(folder: Path) -> None:
    """Writes all files into a folder, the same each time."""
    for file in (Path(__file__).parent / "given").glob("[!_]*.py"):
        shutil.copy(file, folder)
    _write_pictures(folder / "pictures")
    _write_boxes(folder / "coco")
    drawn = random.Random(2)
    for name, count in (("talks.jsonl", 40), ("more.jsonl", 24)):
        (folder / name).write_text("".join(f"{json.dumps(_talk(drawn))}\n" for _ in range(count)))
    (folder / "text").write_text("\n".join(_said(drawn, 8) for _ in range(300)))
    (folder / "tokens").mkdir()
    noise = np.random.default_rng(1)
    for split, count in (("train", 1600), ("val", 500)):
        (noise.integers(0, 60, count) // 3).astype("<u2").tofile(folder / "tokens" / f"{split}.bin")
    if not left_out("conversations"):
        _write_model(folder / "llama")


def _said(drawn: random.Random, most: int) -> str:
    return " ".join(drawn.choices(_WORDS, k=drawn.randint(1, most)))


def _talk(drawn: random.Random) -> dict[str, list[dict[str, str]]]:
    turns = [(role, _said(drawn, 6)) for _ in range(drawn.randint(1, 2)) for role in ("user", "assistant")]
    return {"messages": [{"role": role, "content": said} for role, said in turns]}


def _write_pictures(root: Path) -> None:
    """Writes 44 pictures of three unequal classes, 32 of them to train on, two of which are damaged."""
    from PIL import Image

    noise = np.random.default_rng(0)
    for split, count in (("train", 32), ("val", 12)):
        for number in range(count):
            folder = root / split / "aabbbc"[number % 6]
            folder.mkdir(parents=True, exist_ok=True)
            height, width = noise.integers(17, 40, 2)
            pixels = noise.integers(0, 256, (height, width, 3), np.uint8)
            Image.fromarray(pixels).save(folder / f"{number}.{'jpg' if number % 2 else 'png'}")
    for damaged in ("a/7.jpg", "b/14.png"):
        file = root / "train" / damaged
        file.write_bytes(file.read_bytes()[:100])


def _write_boxes(root: Path) -> None:
    """Writes pictures with boxes of two classes, in COCO's form."""
    from PIL import Image

    noise = np.random.default_rng(3)
    (root / "annotations").mkdir(parents=True)
    for split, count in (("train", 28), ("val", 9)):
        (root / split).mkdir()
        images: list[dict[str, Any]] = []
        boxes: list[dict[str, Any]] = []
        for number in range(count):
            pixels = noise.integers(0, 60, (40, 56, 3), np.uint8)
            for _ in range(int(noise.integers(1, 4))):
                left, top, width, height = map(int, noise.integers((0, 0, 8, 8), (36, 20, 20, 20)))
                kind = int(noise.integers(0, 2))
                pixels[top : top + height, left : left + width, kind] = 250
                box = {"id": len(boxes) + 1, "image_id": number + 1, "category_id": (3, 7)[kind]}
                size = {"bbox": [left, top, width, height], "area": width * height, "iscrowd": 0}
                boxes.append({**box, **size})
            Image.fromarray(pixels).save(root / split / f"{number}.png")
            images.append({"id": number + 1, "file_name": f"{number}.png", "width": 56, "height": 40})
        kinds = [{"id": 3, "name": "red"}, {"id": 7, "name": "green"}]
        told = {"images": images, "annotations": boxes, "categories": kinds}
        (root / "annotations" / f"instances_{split}.json").write_text(json.dumps(told))


def _write_model(folder: Path) -> None:
    from tests.helpers.chat_folders import CHATML, chat_folder
    from tests.helpers.hf_models import folder_of

    folder_of("llama", folder, vocab_size=420, max_position_embeddings=128)
    chat_folder(folder, template=CHATML)
