"""Directories for sentence-transformers: its vectors equal those of heedful."""

from pathlib import Path

import numpy as np
import pytest
from test_onnx import TEXT, model_of

from heedful.errors import UserError
from heedful.export.sentence_transformers import export_sentence_transformers

st = pytest.importorskip("sentence_transformers", reason="sentence_transformers is not installed")
TEXTS = [TEXT, "words", "it is 12 of more", "a"]


@pytest.mark.parametrize("pooling", ["mean", "first", "last"])
@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_vectors_are_equal(name: str, pooling: str, tmp_path: Path) -> None:
    model = model_of(name)
    export_sentence_transformers(model, tmp_path / "out", pooling=pooling)
    other = st.SentenceTransformer(str(tmp_path / "out"), device="cpu")
    expected = model.vectors(TEXTS, pooling=pooling)
    np.testing.assert_allclose(other.encode(TEXTS), expected, atol=1e-5)
    assert other.max_seq_length == model.config.max_length
    export_sentence_transformers(model, tmp_path / "out", pooling=pooling, overwrite=True)


def test_other_models_and_poolings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="needs an encoder-only model"):
        export_sentence_transformers(model_of("gpt2"), tmp_path / "out")
    with pytest.raises(UserError, match="pooling must be mean, first, last, not max"):
        export_sentence_transformers(model_of("bert"), tmp_path / "out", pooling="max")
