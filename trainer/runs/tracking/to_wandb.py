"""Weights & Biases: online if there is a key, else files that `wandb sync` uploads. It never prompts.

Each record is an entry of W&B's history, in order of arrival; charts have the run's `step` as their axis,
because W&B's own counter can't go back and refuses late entries.
"""

import netrc
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

from trainer.errors import BadInputError
from trainer.host.here import path_shown
from trainer.observe.rows import pictures_of, tag
from trainer.runs.tracking.tracker import metrics_of, silent

_MODES = ("online", "offline", "disabled", "dryrun", "run", "shared")
_SERVER = "https://api.wandb.ai"
_INIT_S = 20.0  # for the server's answer; then it goes offline
_FINISH_S = 20.0  # for the upload at the end; wandb's own default is to wait without a bound
_FLUSH_S = 1.0  # a killed run loses what wandb hasn't written: 15 s of records by default


class ToWandb:
    """Tracker for W&B; its run has the id of the trainer's run, by which it is resumed."""

    environment: ClassVar = {"WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"}

    @staticmethod
    def check(environment: Mapping[str, str]) -> None:
        """Refuses an unknown WANDB_MODE, and with WANDB_MODE=online a server that doesn't answer."""
        mode = environment.get("WANDB_MODE", "")
        if mode and mode not in _MODES:
            raise BadInputError(f"log.to=wandb: WANDB_MODE={mode} is none of {', '.join(_MODES[:3])}")
        server = environment.get("WANDB_BASE_URL") or _SERVER
        if mode == "online" and (why := silent(server)):
            raise BadInputError(
                f"log.to=wandb: WANDB_MODE=online, and {server} doesn't answer ({why}); WANDB_MODE=offline "
                "writes files that wandb sync uploads"
            )

    def open(self, about: dict[str, Any]) -> tuple[str, str]:
        """See `Tracker.open`."""
        self._mine = "WANDB_SERVICE" not in os.environ  # else a script uses W&B itself, and calls `fit`
        import wandb

        mode = os.environ.get("WANDB_MODE") or ("online" if _has_key(wandb) else "offline")
        try:
            self._begin(wandb, about, mode)
        except Exception as error:
            if mode != "online":
                raise
            self._tear_down(wandb)
            self._begin(wandb, about, "offline")
            why = " ".join(str(error).split())[:200]
            return about["run_id"], f"{self._place()} (not online: {why})"
        return about["run_id"], self._place()

    def _begin(self, wandb: Any, about: dict[str, Any], mode: str) -> None:
        wanted = {
            "console": "off",
            "disable_code": True,
            "disable_git": True,
            "finish_timeout": _FINISH_S,
            "init_timeout": _INIT_S,
            "reinit": "create_new",
            "silent": True,
            "x_disable_machine_info": True,  # the trainer's records have it
            "x_disable_meta": True,
            "x_disable_stats": True,
            "x_save_requirements": False,
            "x_transaction_log_flush_interval": _FLUSH_S,
        }
        known = {name: value for name, value in wanted.items() if name in wandb.Settings.model_fields}
        if "create_new" not in str(wandb.Settings.model_fields["reinit"].annotation):  # before 0.19.10
            del known["reinit"]
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or about["recipe"],
            id=about["run_id"],
            resume="allow",
            name=about["name"],
            config={**about["config"], "commit": about["commit"]},
            allow_val_change=True,
            dir=os.environ.get("WANDB_DIR") or about["folder"],
            mode=mode,
            settings=wandb.Settings(**known),
        )
        self._run.define_metric("*", step_metric="step")
        self._folder = Path(about["folder"])
        self._rows = max(int(about["rows"]), int(self._run.step))

    def _place(self) -> str:
        if self._run.disabled:
            return "off (WANDB_MODE)"
        if self._run.offline:
            files = Path(self._run.dir).parent.parent / f"offline-run-*-{self._run.id}"
            return f"offline; upload it by wandb sync {path_shown(files)}"
        return str(self._run.url)

    def log(self, rows: list[dict[str, Any]]) -> None:
        """See `Tracker.log`."""
        import wandb

        for row in rows:
            if row["kind"] == "verdict":
                self._run.summary["verdict"] = row["text"]
            elif row["kind"] == "end":
                self._run.summary.update(metrics_of(row))
            else:
                at = {"step": row["step"], "_timestamp": row["time"]}
                pictures = {
                    tag("hook", n): wandb.Image(str(file)) for n, file in pictures_of(row, self._folder)
                }
                self._run.log({**metrics_of(row), **pictures, **at}, step=self._rows, commit=True)
                self._rows += 1

    def close(self, status: str) -> None:
        """See `Tracker.close`."""
        import wandb

        if status == "stopped":
            self._run.mark_preempting()
        self._run.finish(exit_code=0 if status in ("finished", "running") else 1)
        self._tear_down(wandb)

    def _tear_down(self, wandb: Any) -> None:
        if self._mine:
            with suppress(Exception):
                wandb.teardown()


def _has_key(wandb: Any) -> bool:
    """True if W&B would find a key for its server; otherwise it would prompt for one."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(wandb.setup().settings.base_url).netloc
    for file in (os.environ.get("NETRC"), "~/.netrc", "~/_netrc"):
        with suppress(OSError, netrc.NetrcParseError):
            if file and netrc.netrc(str(Path(file).expanduser())).authenticators(host):
                return True
    return False
