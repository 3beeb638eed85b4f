"""Flags of `train` and `distill` that set keys of the recipe."""

import json
from dataclasses import dataclass, fields
from typing import Any

import typer

PANEL = "Settings of the recipe"
KEYS = {  # of the recipe, by field
    "steps": "training.max_steps",
    "epochs": "training.max_epochs",
    "minutes": "training.max_minutes",
    "lr": "training.schedule.learning_rate",
    "batch_tokens": "training.batch_tokens",
    "seed": "training.seed",
    "device": "training.device",
    "precision": "training.precision",
    "init_from": "init_from",
}


def _flag(name: str, metavar: str, help: str, least: int | None = None) -> Any:
    return typer.Option(
        None,
        f"--{name.replace('_', '-')}",
        metavar=metavar,
        min=least,
        help=f"{help} ({KEYS[name]}).",
        rich_help_panel=PANEL,
    )


@dataclass(frozen=True)
class TrainingFlags:
    """Keys of the recipe with a flag of their own, and `--set` for all others."""

    steps: int | None = _flag("steps", "N", "Optimizer steps at which the run ends", 1)
    epochs: int | None = _flag("epochs", "N", "Epochs at which the run ends", 1)
    minutes: float | None = _flag("minutes", "X", "Minutes at which the run ends")
    lr: float | None = _flag("lr", "X", "Peak learning rate")
    batch_tokens: int | None = _flag("batch_tokens", "N", "Tokens per batch, padding included", 1)
    seed: int | None = _flag("seed", "N", "Seed of weights, dropout and the order of data", 0)
    device: str | None = _flag("device", "DEVICE", "auto, cpu, cuda, cuda:N or mps")
    precision: str | None = _flag("precision", "NAME", "auto, fp32, bf16 or fp16")
    init_from: str | None = _flag("init_from", "MODEL", "Model directory to start from")
    settings: list[str] | None = typer.Option(
        None,
        "--set",
        metavar="KEY=VALUE",
        help="Set any other key, e.g. model.d_model=128; repeatable. heedful recipes show RECIPE "
        "prints all keys.",
        rich_help_panel=PANEL,
    )

    @property
    def overrides(self) -> list[str]:
        """`key=value` for each key that is set; those of `--set` come last."""
        values = {
            key: getattr(self, name)
            for name, key in KEYS.items()
            if getattr(self, name) is not None
        }
        # JSON, so that no path is read as a number or a date.
        settings = [
            f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in values.items()
        ]
        return [*settings, *(self.settings or [])]

    @property
    def changed_keys(self) -> list[str]:
        """The keys that are set."""
        return [setting.partition("=")[0] for setting in self.overrides]


assert {field.name for field in fields(TrainingFlags)} == {*KEYS, "settings"}
