"""Names the collective that not all ranks entered, from the dumps of torch's flight recorder.

torch keeps the newest collectives of its process groups in a ring of TORCH_FR_BUFFER_SIZE entries, up to
torch 2.7 of TORCH_NCCL_TRACE_BUFFER_SIZE. The dumps that it writes itself are pickles, which are never read
here; the same as JSON comes from `_dump_nccl_trace_json` (NCCL, from torch 2.5 on) and `_dump_fr_trace_json`
(the others, from 2.8 on). Its fields are those of torch/csrc/distributed/c10d/FlightRecorder.hpp: `entries`
(none: the key is absent), each with `process_group` [name, description], `collective_seq_id` (from 1 on, the
same on all ranks of a group), `profiling_name`, sizes, dtypes and `state`: "scheduled" from when the host
called it, "completed" once the GPU has done it, between them "started" if TORCH_NCCL_ENABLE_TIMING=1;
`pg_status` with the last number that was completed; `pg_config` with the ranks of each group. Gloo leaves
the state at "scheduled" and has no `pg_config`, and its last number may be too low for good.

torch's own analyzer (`torchfrtrace`) is not used: its code is in the wheel of 2.14.1, but not in those of
2.5.1 and 2.9.1, which bring the command alone; it unpickles whole dumps from a folder, and wants `pg_config`.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from trainer.observe.text import enumerated

_KEPT = 3  # collectives of each group, from the last completed one on


class _Group(NamedTuple):
    """Process group: name, description, and ranks as torch writes them, "[0, 1]"."""

    name: str
    description: str
    ranks: str


class _Kept(NamedTuple):
    """Records of a group on one rank: collectives by number, the last entered and completed number."""

    entries: dict[int, dict[str, Any]]
    entered: int
    completed: int


def dump_recorder() -> str | None:
    """Dumps this process's flight recorder, shortened for `parse_dumps` to some hundred bytes.

    Call it in a daemon thread: it queries CUDA events, and a hanging driver may not answer.

    Returns:
        JSON; None if nothing was recorded, or this torch has no such dump.
    """
    import torch

    name = "_dump_nccl_trace_json" if torch.cuda.is_initialized() else "_dump_fr_trace_json"
    ask = getattr(getattr(torch._C, "_distributed_c10d", None), name, None)
    if ask is None:
        return None
    try:
        return shortened(ask(includeCollectives=True, onlyActive=False).decode())
    except (RuntimeError, ValueError, LookupError, TypeError):  # a lost device, or another format
        return None


def shortened(text: str) -> str | None:
    """Shortens a dump to each group's last completed collective, the next few and the last; None if empty."""
    whole = json.loads(text)
    kept = []
    for group, seen in _groups(whole).items():
        first = seen.completed
        kept += [
            {
                "process_group": [group.name, group.description],
                **{key: entry.get(key) for key in ("collective_seq_id", "profiling_name", "state")},
                **{key: entry.get(key) for key in ("input_sizes", "input_dtypes", "pg_id")},
            }
            for number, entry in sorted(seen.entries.items())
            if first <= number < first + _KEPT or number == seen.entered
        ]
    if not kept:
        return None
    return json.dumps({"entries": kept, **{key: whole.get(key) for key in ("pg_config", "pg_status")}})


def parse_dumps(dumps: Mapping[int, str | None]) -> str | None:
    """Names the collective in which the ranks differ.

    In each process group it is the one after the last that all ranks completed: some ranks didn't enter it,
    or entered another operation or size, or completed it while others didn't. In the last case a later
    collective that only some entered is reported as well.

    Args:
        dumps: For each rank the result of `dump_recorder`, or torch's whole dump; None without one.

    Returns:
        "collective 7, all_reduce of 25 x 2 Float: ranks 0 and 1 entered it, rank 2 did not"; None if no rank
        waits, or the dumps don't show it.
    """
    seen: dict[_Group, dict[int, _Kept]] = {}
    recorded = set[int]()
    for rank, text in dumps.items():
        try:
            groups = _groups(json.loads(shortened(text) or "{}")) if text else {}
        except (ValueError, TypeError, AttributeError, KeyError):
            groups = {}
        recorded |= {rank} if groups else set()
        for group, ours in groups.items():
            seen.setdefault(group, {})[rank] = ours
    sentences = [_sentence(group, ranks, recorded, dumps) for group, ranks in seen.items()]
    return "; ".join(sentence for sentence in sentences if sentence) or None


def _groups(whole: Mapping[str, Any]) -> dict[_Group, _Kept]:
    """Returns a dump's records by group, without point-to-point operations, which concern two ranks."""
    found: dict[_Group, dict[int, dict[str, Any]]] = {}
    for entry in whole.get("entries", []):
        if entry.get("is_p2p"):
            continue
        name, description = entry["process_group"]
        ranks = str(whole.get("pg_config", {}).get(name, {}).get("ranks", ""))
        group = _Group(str(name), str(description), ranks)
        # Several operations that were coalesced have one number: the first of them stands for all.
        found.setdefault(group, {}).setdefault(int(entry["collective_seq_id"]), entry)
    return {
        group: _Kept(entries, max(entries), _completed(entries, whole.get("pg_status", {})))
        for group, entries in found.items()
    }


def _completed(entries: Mapping[int, Mapping[str, Any]], status: Mapping[str, Any]) -> int:
    """Returns the last number that this rank's device completed, by states or by torch's watchdog."""
    done = [number for number, entry in entries.items() if entry.get("state") == "completed"]
    groups = {str(entry.get("pg_id")) for entry in entries.values()}
    done += [int(status[one].get("last_completed_collective", -1)) for one in groups if one in status]
    return max([min(entries) - 1, *done])


def _sentence(
    group: _Group, seen: Mapping[int, _Kept], recorded: set[int], dumps: Mapping[int, str | None]
) -> str:
    """Describes one group; "" if none of its ranks waits."""
    members = [int(word) for word in re.findall(r"\d+", group.ranks)]
    if not members:  # without pg_config, only the ranks that entered something are known
        members = sorted(dumps if group.description == "default_pg" else seen)
    # A rank whose recorder has other groups alone entered no collective of this one.
    known = [rank for rank in members if rank in seen or rank in recorded]
    number = 1 + min((seen[rank].completed if rank in seen else 0 for rank in known), default=0)
    unknown = [rank for rank in members if rank not in known]
    silent = f"; of {_names(unknown)} nothing is known" if unknown else ""
    text = _standing(group, seen, known, number)
    # All ranks have entered a collective that is done on one. gloo's count lags on a rank that waits before
    # the next one, and its threads may count two collectives in the wrong order, and stay at the first.
    last = [seen[rank].entered for rank in known if rank in seen]
    if (": done on " in text or _by_gloo(seen)) and max(last) > min(last) >= number:
        text += f"; {_standing(group, seen, known, min(last) + 1)}"
    return text and text + silent


def _standing(group: _Group, seen: Mapping[int, _Kept], known: Sequence[int], number: int) -> str:
    """Describes which of the known ranks entered a collective; "" if none did."""
    entered = {
        rank: seen[rank].entries[number] for rank in known if rank in seen and number in seen[rank].entries
    }
    late = [rank for rank in known if rank not in seen or seen[rank].entered < number]
    head = f"collective {number}{_place(group)}"
    if not entered:  # no rank has entered it, or the ring no longer has it
        past = [rank for rank in known if rank not in late]
        return f"{head}: {_names(past)} entered it, {_names(late)} did not" if past else ""
    wants = {rank: _what(entry) for rank, entry in entered.items()}
    kinds = list(dict.fromkeys(wants.values()))
    if len(kinds) > 1:
        parts = [f"{kind} on {_names([r for r in wants if wants[r] == kind])}" for kind in kinds]
        return f"{head} differs: {', '.join(parts)}"
    head += f", {kinds[0]}: "
    if late:
        return f"{head}{_names(set(known) - set(late))} entered it, {_names(late)} did not"
    states = {
        rank: "completed" if seen[rank].completed >= number else str(entry.get("state"))
        for rank, entry in entered.items()
    }
    return head + _states(states, known)


def _by_gloo(seen: Mapping[int, _Kept]) -> bool:
    return any("gloo:" in str(e.get("profiling_name")) for one in seen.values() for e in one.entries.values())


def _states(states: Mapping[int, str], known: Sequence[int]) -> str:
    """Describes the ranks' states in a collective that all of them entered."""
    waiting = [rank for rank in states if states[rank] != "completed"]
    if done := [rank for rank in known if rank not in waiting]:
        return f"done on {_names(done)}, not on {_names(waiting)}"
    begun = [rank for rank in waiting if states[rank] == "started"]
    if behind := [rank for rank in waiting if begun and rank not in begun]:
        return f"it runs on {_names(begun)}, the device of {_names(behind)} has not come to it"
    if len(waiting) == 1:
        return f"{_names(waiting)} is in it"
    return f"{_names(waiting)} are in it, and none is through"


def _what(entry: Mapping[str, Any]) -> str:
    """An operation with its sizes and dtype: "all_reduce of 3 x 4 Float"."""
    operation = str(entry.get("profiling_name", "")).partition(":")[2] or "an operation"
    sizes = [" x ".join(map(str, size)) or "1" for size in entry.get("input_sizes") or []]
    types = list(dict.fromkeys(entry.get("input_dtypes") or []))
    shown = ", ".join(sizes[:2]) + (f" and {len(sizes) - 2} more" if len(sizes) > 2 else "")
    return f"{operation} of {shown} {'/'.join(types)}".rstrip() if sizes else operation


def _place(group: _Group) -> str:
    """Describes a group by its ranks; "" for the default group."""
    numbers = [int(word) for word in re.findall(r"\d+", group.ranks)]
    return "" if group.description == "default_pg" or not numbers else f" of the group of {_names(numbers)}"


def _names(ranks: Iterable[int]) -> str:
    numbers = [str(rank) for rank in sorted(ranks)]
    return f"rank{'s' * (len(numbers) > 1)} {enumerated(numbers, 8)}"
