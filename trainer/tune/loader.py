"""Stands in for the search of workers and prefetch until that is merged."""

from dataclasses import dataclass

from trainer.recipe import Recipe


@dataclass(frozen=True)
class LoaderChoice:
    """What was chosen, and lines that say why."""

    workers: int
    prefetch: int
    evidence: list[str]


def choose_loader(_recipe: Recipe, _name: str, _settings: list[str], _ranks: int) -> LoaderChoice | None:
    """None: there is nothing to choose."""
    return None
