"""`--mode=verify`: a recipe on one replica and on other topologies, compared."""

import os

from launcher.config import gin_bindings
from launcher.model_dir import check_model_dir, lease
from launcher.modes import EngineRequest
from launcher.verify.verification import Verification


def run(request: EngineRequest) -> int:
    """Verifies the recipe; see `Verification`."""
    model_dir = check_model_dir(request.run_dir)
    writes_to = None if request.dry_run else model_dir
    with lease.held(writes_to, environ=os.environ, say=print), gin_bindings.usage_errors():
        verification = Verification(
            gin_files=request.gin_file,
            gin_params=request.gin_param,
            seed=request.seed,
            deterministic=request.deterministic,
            runtime=request.runtime,
        )
        return verification.run(model_dir, dry_run=request.dry_run)
