"""Every test runs with the shapes of the annotated code checked (jaxtyping and beartype)."""

import os
import tempfile

from hypothesis import settings
from jaxtyping import install_import_hook

CHECKED = (
    "parts",
    "models",
    "zoo",
    "data",
    "tasks",
    "generation",
    "evaluation",
    "insight",
    "inference",
    "export",
)
# Prepared data of the tests are the tests' own.
os.environ["HEEDFUL_CACHE"] = tempfile.mkdtemp(prefix="heedful-tests-")
install_import_hook([f"heedful.{room}" for room in CHECKED], "beartype.beartype")
settings.register_profile("quick", max_examples=10)  # make quick
