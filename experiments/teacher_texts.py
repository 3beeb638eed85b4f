"""Training texts that models of earlier rows make: their translations of the training pairs."""

from collections.abc import Sequence
from pathlib import Path

from heedful.data.text_files import read_lines
from heedful.files import write_lines
from heedful.pipelines import Translator, ensemble, load

BEAM, PENALTY = 5, 1.0


def reversed_words(path: Path, folder: Path) -> Path:
    """A copy of a file with the words of each line in reverse order.

    A model that is trained on it writes its translations from right to left.
    """
    made = folder / f"{path.name.removesuffix('.gz')}.reversed"
    if not made.is_file():
        write_lines(made, [_reverse(line) for line in read_lines(path)])
    return made


def translated(
    models: Sequence[Path], text: Path, made: Path, *, is_right_to_left: bool = False
) -> Path:
    """The file `made` with the translations of a text by one model, or by several as an ensemble.

    It is kept: with the same models, another call returns it.

    Args:
        is_right_to_left: the models write their words in reverse order.
    """
    if made.is_file():
        return made
    loaded = [load(path) for path in models]
    assert all(isinstance(model, Translator) for model in loaded)
    model = loaded[0] if len(loaded) == 1 else ensemble(loaded)
    outputs = model.translate(
        [*read_lines(text)], beam_size=BEAM, length_penalty=PENALTY, too_long="truncate"
    )
    write_lines(made, [_reverse(line) if is_right_to_left else line for line in outputs])
    return made


def _reverse(line: str) -> str:
    return " ".join(reversed(line.split()))
