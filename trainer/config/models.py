"""The trainer's own models by name: one table, from which schema, tasks and documentation derive."""

from typing import NamedTuple


class Model(NamedTuple):
    """Model of the trainer, by its name in `model.name`; torchvision's and timm's have further names.

    Attributes:
        tasks: The tasks that train it; a task's first model is the one of a recipe that names none.
        opens: "module:name" of its constructor, called with its task's arguments: the section model, channels
            of an image and classes (classification, detection); the section model, mel bands and classes
            (audio); the section language and the size of the vocabulary (language).
        about: Description for the configuration page; empty where the name suffices.
        reads: Keys of the section model that not every model reads.
        any_size: True if it takes any micro-batch of its task; else one is tried before the start.
    """

    tasks: tuple[str, ...]
    opens: str
    about: str = ""
    reads: tuple[str, ...] = ()
    any_size: bool = False


HF = "hf/"  # begins the name of a language model of the library transformers

_STAGES = ("width", "blocks", "norm")

MODELS = {
    "small_resnet": Model(
        ("classification",),
        "trainer.models.images:SmallResNet",
        reads=(*_STAGES, "dropout"),
        any_size=True,
    ),
    "vit_small": Model(("classification",), "trainer.models.images:vit_small", "ViT-S/16"),
    "gpt": Model(("language",), "trainer.models.gpt:GPT", any_size=True),
    "audio_cnn": Model(("audio",), "trainer.models.audio:AudioCnn", reads=(*_STAGES, "dropout")),
    "tiny_detector": Model(("detection",), "trainer.models.detection:TinyDetector", reads=_STAGES),
}


def models_of(task: str) -> tuple[str, ...]:
    """Returns the names of the trainer's models for a task, its default first; a custom task has none."""
    return tuple(name for name, one in MODELS.items() if task in one.tasks) or ("own",)


def opens(name: str, task: str) -> str | None:
    """Returns "module:name" of the constructor of a task's model; None if the name is unknown."""
    names = models_of(task)
    found = names[0] if name == "auto" else name
    return MODELS[found].opens if found in names else None


def described_models() -> str:
    """Lists all models, for the configuration page."""
    words = (
        f"{name} ({', '.join([*one.tasks, one.about] if one.about else one.tasks)})"
        for name, one in MODELS.items()
    )
    return ", ".join(words)
