"""The server's glossary: of each translator the terms of the pairs that it translates."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from heedful.data.language_tags import is_same_language, matching_tag
from heedful.errors import UserError
from heedful.fidelity import Glossary, GlossaryFile, NoTermsError
from heedful.pipelines import Translator
from heedful.pipelines.keeping import glossary_for
from heedful.serve.languages import sources_of, targets_of

_log = logging.getLogger("heedful.serve")


class Glossaries:
    """The terms of a file for each pair of languages of a translator.

    Those of a table are for all pairs, those of TBX for the pairs whose languages it has.

    Args:
        path: None: there are no terms.

    Raises:
        UserError: a file that is no glossary; TBX for a model that does not name its languages;
            no translation that the model's vocabulary can write.
    """

    def __init__(self, name: str, model: Translator, path: Path | None) -> None:
        self._model = model
        self._of_all: Glossary | None = None
        self._of_pairs: dict[tuple[str | None, str | None], Glossary] = {}
        if path is None:
            return
        file = GlossaryFile(path)
        if not file.languages:
            self._of_all = _checked(model, {"glossary": file})
            return
        if not (sources_of(model) and targets_of(model)):
            raise UserError(
                f"{path} is TBX, with several languages, and {name} does not name its languages; "
                'set "src_language" and "tgt_language" in its config.json, or convert the glossary '
                "to a table with tabs: TERM<tab>TRANSLATION"
            )
        sources, targets = (
            [code for code in codes if any(is_same_language(code, tag) for tag in file.languages)]
            for codes in (sources_of(model), targets_of(model))
        )
        for source in sources:
            for target in targets:
                self._add(file, source, target)
        if not self._of_pairs:
            _log.warning("%s has no term from and into languages of %s", path, name)

    def _add(self, file: GlossaryFile, source: str, target: str) -> None:
        """Read the terms of a pair, if there are any."""
        pair = {"src_language": source, "tgt_language": target}
        if source != target:
            try:
                glossary = _checked(self._model, {"glossary": file, **pair})
            except NoTermsError:
                return
            self._of_pairs[source, target] = glossary

    def of(self, source: str | None, target: str | None) -> Glossary | None:
        """The terms of a request's pair; None: there are none."""
        metadata = self._model.metadata
        pair = (
            _one_of(source or metadata.src_language, sources_of(self._model)),
            _one_of(target or metadata.tgt_language, targets_of(self._model)),
        )
        return self._of_all or self._of_pairs.get(pair)


def _checked(model: Translator, options: Mapping[str, Any]) -> Glossary:
    """The terms that a model can write; those left out are logged."""
    glossary = glossary_for(model, options)
    if glossary.left_out:
        _log.warning("%s", glossary.left_out_note())
    return glossary


def _one_of(language: str | None, codes: list[str]) -> str | None:
    """The code of a language; with a single one it need not be given."""
    if len(codes) == 1:
        return codes[0]
    return None if language is None else matching_tag(language, codes)
