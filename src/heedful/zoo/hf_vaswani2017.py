"""The Transformer of 2017 in the Hugging Face format, as a Marian or a PEGASUS of the same outputs.

Both put all sines of the position table before all cosines where the paper has them in turn, so the
model's width is permuted: in every weight that reads or writes it.
"""

import re
from dataclasses import asdict, fields
from typing import Any

import torch
from torch import nn

from heedful.errors import UserError
from heedful.zoo import architecture
from heedful.zoo.saved import make_config, uninitialized_net

# Parameters by their last modules: what they do with the model's width.
_READS = r".*(embedding\.tokens|\.(qkv|q|kv|up)|head\.out)\.weight"  # along their columns
_WRITES = r".*(attention\.sublayer\.out|\.down|norm)\.(weight|bias)"  # along their rows


def export_as(config: Any, net: nn.Module) -> tuple[str, Any, nn.Module]:
    """The architecture, Config and net that are written: Marian's with norms after the sub-layers,
    PEGASUS's with norms before them.

    Raises:
        UserError: neither has a setting; all of them, and what to train with instead.
    """
    name = "marian" if config.norm_placement == "post" else "pegasus"
    _check(config, name)
    known = {field.name for field in fields(architecture(name).config)}
    keys = {key: value for key, value in asdict(config).items() if key in known}
    for part in ("attention_dropout", "activation_dropout"):
        keys[part] = config.dropout if keys[part] is None else keys[part]
    if name == "pegasus" and config.tie_embeddings == "decoder":
        keys["tie_embeddings"] = "none"  # its one matrix is written twice
    theirs = make_config(name, keys)
    weights = dict(net.named_parameters(remove_duplicate=False))
    written = uninitialized_net(name, theirs, weights, "the model")
    order = torch.tensor([*range(0, config.d_model, 2), *range(1, config.d_model, 2)])
    with torch.no_grad():
        for path, parameter in written.named_parameters():
            if path in weights:  # what ours lacks are biases, which are zero
                weight: torch.Tensor = weights[path]
                if re.fullmatch(_READS, path):
                    weight = weight[:, order]
                parameter.copy_(weight[order] if re.fullmatch(_WRITES, path) else weight)
    return name, theirs, written


def _check(config: Any, name: str) -> None:
    """Refuse what the architecture lacks; raises UserError."""
    is_post, eps = name == "marian", nn.LayerNorm(1).eps
    one_vocabulary = config.src_vocab_size == config.tgt_vocab_size
    given = [  # whether it has a place, its key, what it is, what has one
        (config.norm_placement in ("post", "pre"), "model.norm_placement", "pre"),
        (config.positions == "sinusoidal", "model.positions", "sinusoidal"),
        (config.final_norm in (None, not is_post), "model.final_norm", str(not is_post).lower()),
        (config.norm_eps == eps, "model.norm_eps", eps),
        (is_post or one_vocabulary, "tokenizer.joint", "true"),
    ]
    wrong = [(key, instead) for fits, key, instead in given if not fits]
    if wrong:
        values = asdict(config) | {"joint": "false"}
        said = ", ".join(f"{key} {str(values[key.split('.')[1]]).lower()}" for key, _ in wrong)
        instead = " ".join(f"--set {key}={value}" for key, value in wrong)
        raise UserError(
            f"the Hugging Face format has no place for a vaswani2017 with {said}: "
            f"train it with {instead}"
        )
