"""Answers of a chat model to fixed prompts, at each evaluation."""

import time
from itertools import takewhile

import torch

from trainer.models.gpt import cut_after, generated, room_after
from trainer.models.hf_files import end_tokens
from trainer.observe.console import warn
from trainer.observe.log import Row
from trainer.observe.phases import heartbeat
from trainer.tasks.conversations import prompt_tokens
from trainer.train.evaluate import in_evaluation
from trainer.train.state import Run


def answers(run: Run) -> Row | None:
    """Answers `language.prompts` by greedy decoding, which draws no random number.

    Uses the averaged weights if the run keeps them, on rank 0; collective if the model is sharded.

    Returns:
        A record of kind "answers" with the answer to each prompt and the seconds that all took; None without
        prompts, and on ranks that have no part in it.
    """
    state, config = run.state, run.recipe.language
    chat, sharded = getattr(run.task, "chat", None), state.rows is not None
    if chat is None or not config.prompts or (run.world.rank and not sharded):
        return None
    began, ends = time.perf_counter(), end_tokens(run.recipe.model.name, chat.eos, chat.turn_end)
    found = dict[str, str]()
    with in_evaluation(run):
        for prompt in config.prompts:
            begun = torch.from_numpy(prompt_tokens(chat, prompt, "language.prompts")).to(run.world.device)
            room = room_after(state.model, len(begun), config.answer_tokens)
            answer = list[int]()
            for token in generated(state.model, begun, config.answer_tokens, 0.0, whole=sharded):
                heartbeat()  # other ranks wait
                answer.append(token)
                if token in ends and not sharded:  # ranks of a sharded model must call it equally often
                    break
            kept = list(takewhile(lambda token: token not in ends, answer))
            if len(kept) == room < config.answer_tokens:
                warn(f"language.prompts: {prompt!r:.60}: {cut_after(state.model, room)}")
            found[f"answer/{prompt}"] = chat.tokenizer.decode(kept)
    at = {"step": state.step, "epoch": round(run.plan.epoch_at(state.step), 4)}
    return {"kind": "answers", **at, "seconds": round(time.perf_counter() - began, 3), **found}
