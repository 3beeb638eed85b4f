"""Counts the parameters of vaswani2017's base and big, against the paper's 65M and 213M."""

from dataclasses import replace
from typing import Any

import torch

from common import argument_parser, command_line, table, write_results
from heedful.zoo.vaswani2017 import SIZES, Config, build

VOCABULARY = 37_000
PAPER = {"base": 65_000_000, "big": 213_000_000}


def main() -> None:
    """Build both on the meta device, count, compare, write."""
    arguments = argument_parser(__doc__ or "").parse_args()
    data = {size: describe(size) for size in PAPER}
    write_results(
        "parameters",
        "Parameters of the Transformer of 2017",
        [
            f"`heedful.zoo.vaswani2017` with the paper's sizes and one shared vocabulary of "
            f"{VOCABULARY:,} entries, built on torch's meta device and counted. Shared weights "
            "count once; sinusoidal positions have no parameters.",
            "## Component by component",
            components_table(data),
            "## Against the paper's Table 3",
            paper_table(data),
            "## Possible explanations of the difference",
            "Each row changes one setting. Totals, and in parentheses the remaining difference "
            "from the paper:",
            variants_table(data),
            vocabulary_note(data),
        ],
        {"vocabulary": VOCABULARY, "sizes": data},
        directory=arguments.results,
        command=command_line(),
        made_on="Counted",
    )


def describe(size: str) -> dict[str, Any]:
    """The counts of a size, and their comparison with the paper."""
    config = Config(VOCABULARY, VOCABULARY, **SIZES[size])
    total = count(config)
    paper = PAPER[size]
    width = config.d_model
    return {
        "d_model": width,
        "components": components(config),
        "total": total,
        "paper": paper,
        "difference": total - paper,
        "difference_percent": 100 * (total - paper) / paper,
        "rows_of_difference": (paper - total) / width,
        # The paper rounds to whole millions.
        "vocabulary_needed": [
            VOCABULARY + (paper + offset - total) / width for offset in (-500_000, 500_000)
        ],
        "variants": {name: count(variant) for name, variant in variants(config).items()},
    }


def count(config: Config) -> int:
    """Parameters of the net that a config builds."""
    with torch.device("meta"):
        return size_of(build(config))


def size_of(module: torch.nn.Module) -> int:
    """Parameters of a module, shared ones counted once."""
    return sum(parameter.numel() for parameter in module.parameters())


def components(config: Config) -> dict[str, int]:
    """Parameters of the embedding, and of the parts of a layer and the whole of each stack."""
    with torch.device("meta"):
        net = build(config)
    assert net.head.out.weight is net.src_embedding.tokens.weight
    counts = {"embedding, shared with the output": size_of(net.src_embedding)}
    total = size_of(net.src_embedding)
    for side, stack in (("encoder", net.encoder), ("decoder", net.decoder)):
        layers = len(stack.blocks)
        layer = layer_components(stack.blocks[0])
        counts |= {f"{side} layer: {name}": number for name, number in layer.items()}
        counts[f"{side}: {layers} layers"] = layers * sum(layer.values())
        if size_of(stack.final_norm):
            counts[f"{side}: last norm"] = size_of(stack.final_norm)
        total += layers * sum(layer.values()) + size_of(stack.final_norm)
    assert total == size_of(net)
    return counts


def layer_components(block: Any) -> dict[str, int]:
    """Parameters of one layer, by part."""
    parts = {
        "self-attention": block.self_attention,
        "cross-attention": block.cross_attention,
        "feed-forward": block.feedforward,
    }
    present = {name: part for name, part in parts.items() if part is not None}
    counts = {name: size_of(part.sublayer) for name, part in present.items()}
    return counts | {"norms": sum(size_of(part.norm) for part in present.values())}


def variants(config: Config) -> dict[str, Config]:
    """Configs with one change each, in which papers and implementations differ."""
    return {
        "as built": config,
        "no bias in attention and feed-forward": replace(config, bias=False),
        "a norm after each stack": replace(config, final_norm=True),
        f"learned positions, {config.max_length} per side": replace(config, positions="learned"),
        "separate source embedding": replace(config, tie_embeddings="decoder"),
        "nothing shared": replace(config, tie_embeddings="none"),
    }


def components_table(data: dict[str, Any]) -> str:
    """A table of all components, with a column for each size."""
    rows = [
        [name, *(f"{data[size]['components'][name]:,}" for size in data)]
        for name in data["base"]["components"]
    ]
    totals = ["**total**", *(f"**{data[size]['total']:,}**" for size in data)]
    return table(["", *data], [*rows, totals])


def paper_table(data: dict[str, Any]) -> str:
    """A table of heedful's and the paper's totals, and their differences."""
    rows = [
        [
            size,
            f"{record['total']:,}",
            f"{record['paper']:,}",
            f"{record['difference']:+,}",
            f"{record['difference_percent']:+.2f}%",
            f"{-record['rows_of_difference']:+,.1f}",
        ]
        for size, record in data.items()
    ]
    header = ["", "heedful", "paper", "difference", "in percent", "in rows of the embedding"]
    return table(header, rows)


def variants_table(data: dict[str, Any]) -> str:
    """A table of all variants, with a column for each size."""
    rows = []
    for name in data["base"]["variants"]:
        cells = []
        for record in data.values():
            total = record["variants"][name]
            cells.append(f"{total:,} ({total - record['paper']:+,})")
        rows.append([name, *cells])
    return table(["", *data], rows)


def vocabulary_note(data: dict[str, Any]) -> str:
    """A paragraph on the vocabulary sizes that explain the paper's figures."""
    spans = {size: data[size]["vocabulary_needed"] for size in data}
    needed_rows = "; ".join(
        f"{size} needs {low:,.0f} to {high:,.0f} rows" for size, (low, high) in spans.items()
    )
    lowest_high = min(high for _, high in spans.values())
    highest_low = max(low for low, _ in spans.values())
    verdict = (
        "The two ranges do not overlap: no single vocabulary explains both figures"
        if highest_low > lowest_high
        else f"A vocabulary of {highest_low:,.0f} to {lowest_high:,.0f} explains both figures"
    )
    signs = {data[size]["difference"] > 0 for size in data}
    same_way = (
        "Base has fewer parameters than in the paper and big has more, so that no change which "
        "only adds or only removes parameters explains both."
        if len(signs) == 2
        else "Both differ in the same direction."
    )
    return (
        "The paper gives the size of the vocabulary only approximately. If its figures are "
        f"rounded to whole millions, {needed_rows}. {verdict}. {same_way}"
    )


if __name__ == "__main__":
    main()
