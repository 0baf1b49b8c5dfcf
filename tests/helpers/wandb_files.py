"""Records that wandb wrote offline, in a log of LevelDB's form behind a header of wandb's."""

import json
from pathlib import Path
from typing import Any

_HEADER, _BLOCK = 7, 1 << 15


def records(file: Path) -> list[Any]:
    """The records of a .wandb file: messages of wandb's own protocol."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, found, part = file.read_bytes(), _HEADER, list[Any](), b""
    assert data[:4] == b":W&B", data[:_HEADER]
    while at + _HEADER <= len(data):
        if _BLOCK - at % _BLOCK < _HEADER:
            at += _BLOCK - at % _BLOCK
            continue
        sum_, length, kind = data[at : at + 4], int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        body = data[at + _HEADER : at + _HEADER + length]
        assert len(sum_) == 4 and len(body) == length, f"{file}: cut off"
        at += _HEADER + length
        part = body if kind in (1, 2) else part + body
        if kind in (1, 4):
            found.append(Record.FromString(part))
    return found


def history(found: list[Any]) -> list[dict[str, Any]]:
    """The rows of the charts."""
    rows = [one.history for one in found if one.WhichOneof("record_type") == "history"]
    names = [{".".join(one.nested_key) or one.key: one.value_json for one in row.item} for row in rows]
    return [{name: json.loads(value) for name, value in row.items()} for row in names]
