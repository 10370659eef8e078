"""Assets of a task, which belong to the weights and are none, such as its vocabulary, in MODEL_DIR/assets."""

from pathlib import Path

from launcher.errors import UsageError
from launcher.tasks.base import Assets, Task


def folder(model_dir: str) -> Path:
    return Path(model_dir, "assets")


def check(model_dir: str, task: Task) -> None:
    """Raises UsageError where the weights, with what the task has now, would read and write something else."""
    kept = read(model_dir)
    for name, content in task.assets().items():
        if kept.get(name, content) != content:
            raise UsageError(
                f"{folder(model_dir) / name} is not what the data gives now: the weights in {model_dir} "
                "were trained with another one. Use the data and the bindings they were trained with, or choose "
                "another --model_dir"
            )


def save(model_dir: str, task: Task) -> None:
    """Keeps the task's assets, each file whole or not at all; what is there already stays."""
    for name, content in task.assets().items():
        path = folder(model_dir) / name
        partial = path.with_name(f"{name}.partial")
        try:
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                partial.write_bytes(content)
                partial.replace(path)
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error}; choose another --model_dir") from None


def read(model_dir: str) -> Assets:
    """All that was kept, by file name; nothing where no run kept anything."""
    path = folder(model_dir)
    files = sorted(path.iterdir()) if path.is_dir() else ()
    return {file.name: file.read_bytes() for file in files if file.is_file() and file.suffix != ".partial"}
