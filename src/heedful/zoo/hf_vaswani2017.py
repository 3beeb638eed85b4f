"""The Transformer of 2017 in the Hugging Face format: a Marian or PEGASUS with equal outputs.

Their position tables have all sines before all cosines, where the paper interleaves them, so the
dimensions of the model are permuted in every weight.
"""

import re
from dataclasses import asdict, fields
from typing import Any

import torch
from torch import nn

from heedful.errors import UserError
from heedful.zoo import architecture
from heedful.zoo.saved import make_config, uninitialized_net

# Parameters whose columns, and whose rows, are dimensions of the model.
_COLUMNS = r".*(embedding\.tokens|\.(qkv|q|kv|up)|head\.out)\.weight"
_ROWS = r".*(attention\.sublayer\.out|\.down|norm)\.(weight|bias)"


def export_as(config: Any, net: nn.Module) -> tuple[str, Any, nn.Module]:
    """Architecture, Config and net for the export: Marian with post-norm, PEGASUS with pre-norm.

    Raises:
        UserError: settings that neither architecture has; lists all of them, with supported values.
    """
    name = "marian" if config.norm_placement == "post" else "pegasus"
    _check(config, name)
    known = {field.name for field in fields(architecture(name).config)}
    keys = {key: value for key, value in asdict(config).items() if key in known}
    for part in ("attention_dropout", "activation_dropout"):
        keys[part] = config.dropout if keys[part] is None else keys[part]
    if name == "pegasus" and config.tie_embeddings == "decoder":
        keys["tie_embeddings"] = "none"  # the matrix is written twice
    exported_config = make_config(name, keys)
    weights = dict(net.named_parameters(remove_duplicate=False))
    exported = uninitialized_net(name, exported_config, weights, "the model")
    order = torch.tensor([*range(0, config.d_model, 2), *range(1, config.d_model, 2)])
    with torch.no_grad():
        for path, parameter in exported.named_parameters():
            if path in weights:  # others are biases, which stay zero
                weight: torch.Tensor = weights[path]
                if re.fullmatch(_COLUMNS, path):
                    weight = weight[:, order]
                parameter.copy_(weight[order] if re.fullmatch(_ROWS, path) else weight)
    return name, exported_config, exported


def _check(config: Any, name: str) -> None:
    """Raise UserError for settings that the architecture `name` does not have."""
    is_post, eps = name == "marian", nn.LayerNorm(1).eps
    one_vocabulary = config.src_vocab_size == config.tgt_vocab_size
    settings = [  # is supported, key, supported value
        (config.norm_placement in ("post", "pre"), "model.norm_placement", "pre"),
        (config.positions == "sinusoidal", "model.positions", "sinusoidal"),
        (config.final_norm in (None, not is_post), "model.final_norm", str(not is_post).lower()),
        (config.norm_eps == eps, "model.norm_eps", eps),
        (is_post or one_vocabulary, "tokenizer.joint", "true"),
    ]
    wrong = [(key, value) for is_supported, key, value in settings if not is_supported]
    if wrong:
        values = asdict(config) | {"joint": "false"}
        listed = ", ".join(f"{key} {str(values[key.split('.')[1]]).lower()}" for key, _ in wrong)
        instead = " ".join(f"{key}={value}" for key, value in wrong)
        raise UserError(
            f"the Hugging Face format does not support a vaswani2017 with {listed}: "
            f"train it with {instead}"
        )
