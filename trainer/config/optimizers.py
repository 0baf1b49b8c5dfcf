"""Optimizers and learning-rate schedules: two tables, from which schema, code and documentation derive."""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Optimizer(NamedTuple):
    """Optimizer, by its name in `optim.name`.

    Attributes:
        opens: "module:class" of the torch.optim.Optimizer, called with parameter groups, `lr` (float32 () on
            the device, looked up at each step) and the keys of `reads`; see `PreallocatedOptimizer` in
            trainer/optim/optimizers.py.
        about: Description for the configuration page; empty where the name suffices.
        reads: Keys of the section optim that it takes, in addition to lr, weight_decay and layer_decay.
        elementwise: True if each number of a parameter is updated by itself, so that a rank may update rows.
    """

    opens: str
    about: str = ""
    reads: tuple[str, ...] = ()
    elementwise: bool = False


OPTIMIZERS = {
    "sgd": Optimizer("trainer.optim.fused:SGD", reads=("momentum", "nesterov"), elementwise=True),
    "adamw": Optimizer("trainer.optim.fused:AdamW", reads=("betas", "eps"), elementwise=True),
    "muon": Optimizer(
        "trainer.optim.muon:Muon",
        "hidden matrices; adamw for the rest; momentum usually 0.95",
        ("momentum", "betas", "eps"),
    ),
}


class Schedule(NamedTuple):
    """Learning-rate schedule, by its name in `optim.schedule`.

    Attributes:
        opens: "module:function", called with the section optim, the range of updates after the warm-up and
            the steps of an epoch; it gives the fraction of the peak at each.
        about: Description for the configuration page; empty where the name suffices.
        warms_up: True if it has a warm-up of its own: its range begins with update 0.
        reads: Keys of the section optim that no other reads, or few.
    """

    opens: str
    about: str = ""
    warms_up: bool = False
    reads: tuple[str, ...] = ()


SCHEDULES = {
    "cosine": Schedule("trainer.optim.schedules:cosine", reads=("final_lr",)),
    "one-cycle": Schedule(
        "trainer.optim.schedules:one_cycle", "cosine up as well", warms_up=True, reads=("final_lr",)
    ),
    "step": Schedule("trainer.optim.schedules:step", "see milestones", reads=("milestones", "gamma")),
    "wsd": Schedule(
        "trainer.optim.schedules:wsd",
        "constant, then a decay over the last part",
        reads=("final_lr", "decay"),
    ),
    "constant": Schedule("trainer.optim.schedules:constant"),
}


def described(table: dict[str, Optimizer] | dict[str, Schedule]) -> str:
    """Lists all rows of a table, for the configuration page: "a, b (what it is) or c"."""
    *most, last = [f"{name} ({one.about})" if one.about else name for name, one in table.items()]
    return f"{', '.join(most)} or {last}"


def read_by(key: str, table: Mapping[str, Any]) -> str:
    """Returns the names of the rows whose `reads` has a key, for the configuration page."""
    return ", ".join(name for name, one in table.items() if key in one.reads)
