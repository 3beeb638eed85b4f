"""Slow imports of the child processes of `commands.py`, which are forked after them."""

import gc
import sys
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules

gc.disable()

import torch  # noqa: E402

import heedful.cli  # noqa: E402

# torch._dynamo is what the first optimizer needs, pytest what `multiprocessing` looks for. With
# `encoder_runs` and `hostile_input`, which functions of tests need there, hypothesis is imported.
for _name in (
    *("pytest", "commands", "torch._dynamo", "sacrebleu.metrics", "jinja2", "numpy.ctypeslib"),
    *("matplotlib.backends.backend_svg", "matplotlib.figure", "pygments.formatters.html"),
    *("pygments.lexers.data", "pygments.styles.default"),
    *(f"heedful.{name}" for name in ("run", "cli.app", "training.listeners", "tasks.synthetic")),
    *(f"heedful.{name}" for name in ("zoo.vaswani2017", "backends.torch.coverage", "cli.lines")),
    *(f"heedful.{name}" for name in ("deploy.optimize", "training.report", "cli.flags")),
    *(f"heedful.{name}" for name in ("backends.torch.eager", "generation.search")),
    *(f"torch.distributed.{name}" for name in ("fsdp", "tensor", "launcher.api", "elastic.agent")),
    *(f"torch.distributed.checkpoint.{name}" for name in ("hf_storage", "state_dict_loader")),
    *("process_group", "heedful.zoo.mixtral", "heedful.zoo.bert", "encoder_runs", "hostile_input"),
    *(f"heedful.cli.{module.name}" for module in iter_modules(heedful.cli.__path__)),
    *("heedful.insight", "langcodes.language_distance"),
    *("ctranslate2", "ctranslate2.specs") * (find_spec("ctranslate2") is not None),
    *("heedful.serve.server",) * (find_spec("fastapi") is not None),
):
    import_module(_name)
sys.modules["heedful.training.report"].pages().get_template("report.html.j2")
# `optimize` measures each setting briefly, in few rounds: any may be the fastest.
_measure = sys.modules["heedful.deploy.measure"]
_measure._MIN_SECONDS, _measure._NUM_SINGLE = 0.0, 2
_measure.find_fastest = partial(_measure.find_fastest, max_rounds=2)
torch.set_num_threads(1)
gc.enable()
gc.collect()
gc.freeze()  # the collections of a child would visit and so copy every object of the imports
