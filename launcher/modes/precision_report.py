"""`--mode=precision_report`: what 16 bits do to a recipe's gradients, which loss scale fits, what they save."""

from launcher.config import gin_bindings
from launcher.modes import Request
from launcher.precision_report import command


def run(request: Request) -> int:
    """Reports on the recipe; see `precision_report.command`."""
    with gin_bindings.usage_errors():
        return command.run(
            gin_files=request.gin_file,
            gin_params=request.gin_param,
            replicas=request.replicas,
            seed=request.seed,
            model_dir=request.run_dir,
            dry_run=request.dry_run,
        )
