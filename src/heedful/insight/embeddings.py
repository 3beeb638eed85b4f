"""Maps of embeddings in two dimensions: of tokens, of positions, of sentences."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from jaxtyping import Float, Int

from heedful import extras
from heedful.errors import UserError, describe
from heedful.insight.plots import new_figure, plain
from heedful.insight.reading import pieces
from heedful.pipelines.base import SavedModel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Kind = Literal["tokens", "positions", "sentences"]
Side = Literal["source", "target"]
Projection = Literal["pca", "tsne", "umap"]
_NEIGHBORS = 8


@dataclass(frozen=True)
class EmbeddingMap:
    """N vectors in two dimensions.

    Attributes:
        kind: the vectors are rows of the embedding matrix (`tokens`), of the position table
            (`positions`), or pooled states of texts (`sentences`).
        names: of the vectors: pieces, numbers of positions, or texts.
        ids: of the vectors: token ids, positions, or indices of the texts.
        points: (N, 2).
        projection: `pca`, `tsne` or `umap`.
        variance: of PCA, the share of the variance that each of the two axes has; empty for the
            others, whose axes have no meaning.
        settings: of the projection, its seed included.
        neighbors: (N, k), indices of the k nearest vectors by cosine, in the space of the model.
        similarities: (N, k), their cosines.
        labels: a label of each vector, for its color; empty without.
        num_left_out: vectors beyond the limit.
    """

    kind: Kind
    names: tuple[str, ...]
    ids: tuple[int, ...]
    points: Float[np.ndarray, "N 2"]
    projection: Projection
    variance: tuple[float, ...]
    settings: dict[str, Any]
    neighbors: Int[np.ndarray, "N k"]
    similarities: Float[np.ndarray, "N k"]
    labels: tuple[str, ...] = ()
    num_left_out: int = 0

    def plot(self) -> "Figure":
        """A scatter plot, with names of up to 200 points."""
        figure, axes = new_figure(14, 14)
        groups = sorted(set(self.labels)) or [""]
        labels = np.array(self.labels or [""] * len(self.names))
        for label in groups:
            points = self.points[labels == label]
            axes.scatter(points[:, 0], points[:, 1], s=12, label=plain(label) or None)
        for name, (x, y) in [*zip(self.names, self.points, strict=True)][:200]:
            axes.annotate(plain(name)[:24], (x, y), fontsize=6)
        if any(groups):
            axes.legend()
        shares = ", ".join(f"{share:.1%}" for share in self.variance)
        axes.set_title(
            f"{self.kind}, {self.projection}" + (f": {shares} of variance" * bool(shares))
        )
        return figure


@dataclass(frozen=True)
class _Vectors:
    names: Sequence[str]
    ids: Sequence[int]
    vectors: Float[np.ndarray, "N D"]
    num_left_out: int = 0
    labels: Sequence[str] = field(default_factory=tuple)


def embedding_map(
    model: SavedModel,
    kind: Kind = "tokens",
    *,
    texts: Sequence[str] = (),
    labels: Sequence[str] = (),
    side: Side = "target",
    projection: Projection = "pca",
    seed: int = 0,
    limit: int = 2000,
) -> EmbeddingMap:
    """Embeddings of a model in two dimensions, with the nearest neighbors of each.

    Args:
        kind: `tokens`, `positions` or `sentences`.
        texts: for `sentences`, whose vectors are `model.vectors(texts)`.
        labels: one for each text.
        side: of an encoder-decoder, whose embedding is meant.
        projection: `pca`; `tsne` (van der Maaten and Hinton 2008), by scikit-learn; or `umap`
            (McInnes et al. 2018), by umap-learn, whose first use compiles for half a minute.
        seed: of t-SNE and UMAP.
        limit: vectors at most; of a vocabulary the lowest ids, which are the most frequent tokens
            of most tokenizers.

    Raises:
        UserError: an unknown kind, side or projection; no texts, or another number of labels; a
            model without a table of positions; fewer than 3 vectors; the package of a projection is
            not installed.

    >>> import heedful
    >>> from heedful import insight
    >>> places = insight.embedding_map(heedful.load("runs/mine"), side="source")
    >>> places.points.shape
    (40, 2)
    """
    for name, value, choices in (
        ("kind", kind, Kind), ("projection", projection, Projection), ("side", side, Side),
    ):  # fmt: skip
        if value not in get_args(choices):
            raise UserError(f"{name} must be {', '.join(get_args(choices))}, not {value!r}")
    if not isinstance(limit, int) or limit < 3:
        raise UserError(f"limit must be at least 3, not {describe(limit)}")
    if texts and kind != "sentences":
        raise UserError(f"texts are for the kind sentences, not {kind}; leave them out")
    if labels and len(labels) != len(texts):
        raise UserError(f"{len(texts)} texts but {len(labels)} labels; give one for each")
    if kind == "sentences":
        rows = _sentences(model, texts, labels, limit)
    else:
        rows = (_tokens if kind == "tokens" else _positions)(model, side, limit)
    if len(rows.vectors) < 3:
        raise UserError(f"a map needs at least 3 {kind}, not {len(rows.vectors)}")
    points, variance, settings = project(rows.vectors, projection, seed)
    neighbors, similarities = nearest(rows.vectors)
    return EmbeddingMap(
        kind, tuple(rows.names), tuple(rows.ids), points, projection, variance, settings,
        neighbors, similarities, tuple(rows.labels), rows.num_left_out,
    )  # fmt: skip


def project(
    vectors: Float[np.ndarray, "N D"], projection: Projection, seed: int
) -> tuple[Float[np.ndarray, "N 2"], tuple[float, ...], dict[str, Any]]:
    """Points (N, 2), the shares of the variance of PCA, and the settings.

    The sign of each axis of PCA is such that its largest coordinate is positive.
    """
    centered = vectors.astype(np.float64) - vectors.mean(0)
    if projection == "pca":
        left, values, _ = np.linalg.svd(centered, full_matrices=False)
        count = min(2, len(values))
        points = np.zeros((len(vectors), 2))
        points[:, :count] = left[:, :count] * values[:count]
        points *= np.where(points[np.abs(points).argmax(0), range(2)] < 0, -1, 1)
        total = float((values**2).sum())
        shares = tuple(float(value**2) / total if total else 0.0 for value in values[:2])
        return points, shares, {"algorithm": "singular value decomposition"}
    if projection == "tsne":
        extras.require("inspect", "the projection tsne")
        from sklearn.manifold import TSNE

        perplexity = float(min(30, max(1, (len(vectors) - 1) // 3)))
        settings = {"perplexity": perplexity, "init": "pca", "learning_rate": "auto"}
        points = TSNE(2, random_state=seed, **settings).fit_transform(centered)
    else:
        extras.require("umap", "the projection umap")
        from umap import UMAP

        neighbors = min(15, len(vectors) - 1)
        settings = {"n_neighbors": neighbors, "min_dist": 0.1, "metric": "euclidean", "init": "pca"}
        umap = UMAP(n_components=2, random_state=seed, n_jobs=1, **settings)
        points = umap.fit_transform(centered)
    return np.asarray(points, np.float64), (), {**settings, "seed": seed}


def nearest(
    vectors: Float[np.ndarray, "N D"],
) -> tuple[Int[np.ndarray, "N k"], Float[np.ndarray, "N k"]]:
    """The nearest other vectors by cosine, best first; a vector of zeros has cosines of 0."""
    unit = vectors.astype(np.float64)
    unit = unit / np.maximum(np.linalg.norm(unit, axis=1, keepdims=True), 1e-12)
    count = min(_NEIGHBORS, len(vectors) - 1)
    indices, cosines = [], []
    for first in range(0, len(unit), 1024):
        products = unit[first : first + 1024] @ unit.T
        products[np.arange(len(products)), np.arange(first, first + len(products))] = -np.inf
        best = np.argsort(-products, axis=1, kind="stable")[:, :count]
        indices.append(best)
        cosines.append(np.take_along_axis(products, best, 1))
    return np.concatenate(indices), np.concatenate(cosines)


def _embedding(model: SavedModel, side: str) -> Any:
    """The `TokenEmbedding` of a net, of one side if it has two."""
    net: Any = model.net
    name = "src_embedding" if side == "source" else "tgt_embedding"
    return getattr(net, name) if hasattr(net, name) else net.embedding


def _tokens(model: SavedModel, side: str, limit: int) -> _Vectors:
    weight = _embedding(model, side).tokens.weight.detach()
    tokenizer = None
    if model.has_tokenizer:
        tokenizer = model.src_tokenizer if side == "source" else model.tgt_tokenizer
    count = min(limit, len(weight))
    names = pieces(tokenizer, range(count))
    return _Vectors(names, range(count), weight[:count].float().cpu().numpy(), len(weight) - count)


def _positions(model: SavedModel, side: str, limit: int) -> _Vectors:
    table = _embedding(model, side).positions
    if table is None:
        raise UserError(
            "this model has no table of positions (they are rotary or relative); take the kind "
            "tokens or sentences"
        )
    weight = table.weight.detach()[table.offset :].float().cpu().numpy()
    count = min(limit, len(weight))
    return _Vectors([*map(str, range(count))], range(count), weight[:count], len(weight) - count)


def _sentences(
    model: SavedModel, texts: Sequence[str], labels: Sequence[str], limit: int
) -> _Vectors:
    if isinstance(texts, str) or not texts:
        raise UserError("the kind sentences needs a list of texts")
    shown = [*texts[:limit]]
    vectors = np.asarray(model.vectors(shown))
    return _Vectors(shown, range(len(shown)), vectors, len(texts) - len(shown), labels[:limit])
