"""Commands that people are told: other modes on the recipe of this one, ready to be pasted into a shell."""

import shlex
from typing import Any

from launcher.machine import installation
from launcher.modes import Request
from launcher.tasks.base import ReadsImages, ReadsLines

_SAME_RUN = ("model_dir", "data_dir", "seed")


def on_same_recipe(request: Request, *more: str, flags: tuple[str, ...] = _SAME_RUN) -> str:
    """The command line that has the request's recipe, `more` flags, and of the request's own those named `flags`."""
    given = [f"--gin_file={name}" for name in request.gin_file] + [f"--gin_param={one}" for one in request.gin_param]
    given += [f"--{name}={value}" for name in flags if (value := getattr(request, name)) is not None]
    return _command(*more, *given)


def _command(*words: str) -> str:
    return f"{installation.python()} -m launcher.main {shlex.join(words)}"


def after_training(request: Request, task: Any) -> dict[str, str]:
    """Commands for a trained model of this task, each by what it is for; none where there is no recipe."""
    if not request.gin_file:
        return {}
    if isinstance(task, ReadsLines):
        predict = ("--input=lines.txt", "--output=answers.txt")
    elif isinstance(task, ReadsImages) and task.decode_images is not None:
        predict = ("--input=photos/*.jpg", "--output=answers.jsonl")
    else:
        predict = ("--input=inputs.npz", "--output=answers.npz")
    commands = {"predict": on_same_recipe(request, "--mode=predict", *predict)}
    if request.mode == "train" and task.data().num_eval_examples:
        commands = {"evaluate": on_same_recipe(request, "--mode=eval"), **commands}
    commands["export"] = on_same_recipe(request, "--mode=export")
    commands["compare"] = _command("--mode=compare", request.run_dir, "OTHER_DIR")
    return commands
