"""The directive `diagram`: a drawing of an architecture, SVG in the page.

Its colors are those of the theme (`_static/site.css`), and it is as wide as a telephone. Words are
in the language of the site; formulas and shapes are the same in all.
"""

import html
from collections.abc import Callable
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

WIDTH = 360
SIZE = 12.5  # of words
SMALL = 11  # of shapes
LINE = 15
CAUSAL = "self-attention, causal"

# Words: Chinese by English. Text that is missing here is the same in both languages.
_CHINESE = {
    "token ids (B, T)": "词元编号 (B, T)",
    "row of the embedding": "取嵌入矩阵的一行",
    "row of the position table": "取位置表的一行",
    "states x (B, T, D)": "状态 x (B, T, D)",
    "way 1: add to the embedding": "方法一：加到嵌入上",
    "way 2: change the scores": "方法二：改变分数",
    "sinusoids, or trained": "正弦曲线，或经训练",
    "rotary: rotate Q and K": "旋转位置编码：旋转 Q 与 K",
    "ALiBi, T5: add a number": "ALiBi、T5：加上一个数",
    "scores Q Kᵀ / √E": "分数 Q Kᵀ / √E",
    "softmax, mean of V": "softmax，V 的均值",
    "softmax over the keys": "对键做 softmax",
    "H heads": "H 个头",
    "mask: −∞ where hidden": "掩码：被隐藏处为 −∞",
    "weights (B, H, T, T)": "权重 (B, H, T, T)",
    "weighted mean of V": "V 的加权均值",
    "join the heads": "拼接各头",
    "output (B, T, D)": "输出 (B, T, D)",
    "attention": "注意力",
    "post-norm (2017)": "后归一化（2017）",
    "pre-norm": "前归一化",
    "norm": "归一化",
    "feed-forward": "前馈网络",
    "self-attention": "自注意力",
    "self-attention, causal": "自注意力（因果）",
    "cross-attention": "交叉注意力",
    "add, norm": "相加、归一化",
    "source ids (B, S)": "源端编号 (B, S)",
    "target ids (B, T)": "目标端编号 (B, T)",
    "embedding · √D": "嵌入 · √D",
    "+ positions": "+ 位置",
    "encoder": "编码器",
    "decoder": "解码器",
    "output layer, W = E": "输出层，W = E",
    "The two ways to put positions into a Transformer": "把位置放进 Transformer 的两种方法",
    "Attention with several heads, and the shapes of its tensors": "多头注意力及其张量的形状",
    "A block with post-norm and a block with pre-norm": "后归一化的块与前归一化的块",
    "The encoder and the decoder of the Transformer of 2017": "2017 年的编码器与解码器",
}


class Canvas:
    """A drawing of a given height; y grows downwards.

    Attributes:
        words: each text with the width that it may have, for a test.
    """

    def __init__(self, title: str, height: float, language: str) -> None:
        self.title, self.height, self.language = title, height, language
        self.parts: list[str] = []
        self.words: list[tuple[str, float, float]] = []

    def translated(self, text: str) -> str:
        return _CHINESE.get(text, text) if self.language == "zh_CN" else text

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        room: float,
        kind: str = "word",
        anchor: str = "middle",
    ) -> None:
        """A line of text around y; its middle, or by `anchor` its start, is at x."""
        shown = self.translated(text)
        size = SMALL if kind == "shape" else SIZE
        self.words.append((shown, size, room))
        self.parts.append(
            f'<text class="{kind}" x="{x:g}" y="{y + size * 0.36:g}" font-size="{size}" '
            f'text-anchor="{anchor}">{html.escape(shown)}</text>'
        )

    def box(
        self, x: float, y: float, width: float, lines: str, *, kind: str = "box", shape: str = ""
    ) -> float:
        """A box around x with lines of text, and a shape below them; returns its lower edge."""
        rows = lines.split("\n")
        height = LINE * (len(rows) + bool(shape)) + 9
        self.parts.append(
            f'<rect class="{kind}" x="{x - width / 2:g}" y="{y:g}" width="{width:g}" '
            f'height="{height:g}" rx="4"/>'
        )
        for index, row in enumerate(rows):
            self.text(x, y + 4.5 + LINE * (index + 0.5), row, room=width - 6)
        if shape:
            middle = y + 4.5 + LINE * (len(rows) + 0.5)
            self.text(x, middle, shape, room=width - 6, kind="shape")
        return y + height

    def frame(self, x: float, y: float, width: float, height: float) -> None:
        """A dashed frame around what is drawn after it."""
        self.parts.append(
            f'<rect class="frame" x="{x:g}" y="{y:g}" width="{width:g}" '
            f'height="{height:g}" rx="8"/>'
        )

    def line(self, *points: tuple[float, float], arrow: bool = True) -> None:
        """A line through points, with a head at its end."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.parts.append(f'<polyline class="line" points="{path}"/>')
        if arrow:
            (x0, y0), (x, y) = points[-2:]
            length = max(abs(x - x0), abs(y - y0))
            dx, dy = (x - x0) / length, (y - y0) / length
            corners = [(x - 6 * dx - s * dy, y - 6 * dy + s * dx) for s in (3.5, -3.5)]
            head = " ".join(f"{a:g},{b:g}" for a, b in ((x, y), *corners))
            self.parts.append(f'<polygon class="head" points="{head}"/>')

    def plus(self, x: float, y: float) -> float:
        """A sum around (x, y); returns its lower edge."""
        self.parts.append(
            f'<circle class="sum" cx="{x:g}" cy="{y:g}" r="8"/><path class="line" '
            f'd="M{x - 4.5:g} {y:g}h9M{x:g} {y - 4.5:g}v9"/>'
        )
        return y + 8

    def render(self) -> str:
        title = html.escape(self.translated(self.title))
        return (
            f'<svg class="diagram" role="img" aria-label="{title}" xmlns="http://www.w3.org/2000/svg"'
            f' viewBox="0 0 {WIDTH} {self.height:g}"><title>{title}</title>'
            + "".join(self.parts)
            + "</svg>"
        )


def positions(language: str) -> Canvas:
    """Where the position schemes of chapter 2 act."""
    c = Canvas("The two ways to put positions into a Transformer", 392, language)
    left, right = 88, 274
    c.text(4, 10, "way 1: add to the embedding", room=190, anchor="start")
    c.text(right, 222, "way 2: change the scores", room=168)
    low = c.box(left, 24, 160, "token ids (B, T)", kind="data")
    c.line((left, low), (left, 62))
    low = c.box(left, 62, 160, "row of the embedding\n· √D", shape="(B, T, D)")
    c.line((left, low), (left, 142))
    bottom = c.box(
        right, 110, 168, "row of the position table\nsinusoids, or trained", shape="(T, D)"
    )
    c.line((right - 84, 150), (left + 8, 150))
    assert bottom > 150
    low = c.plus(left, 150)
    c.line((left, low), (left, 178))
    low = c.box(left, 178, 160, "states x (B, T, D)", kind="data")
    c.line((left, low), (left, 236))
    c.frame(4, 206, 168, 180)
    c.text(10, 219, "attention", room=70, anchor="start")
    low = c.box(left, 236, 150, "Q, K, V", kind="box")
    c.line((left, low), (left, 290))
    c.line((right - 84, 248), (left + 75, 248))
    c.box(right, 236, 168, "rotary: rotate Q and K", kind="choice")
    low = c.box(left, 290, 150, "scores Q Kᵀ / √E")
    c.box(right, 290, 168, "ALiBi, T5: add a number", kind="choice")
    c.line((right - 84, 302), (left + 75, 302))
    c.line((left, low), (left, 344))
    c.box(left, 344, 150, "softmax, mean of V")
    return c


def attention(language: str) -> Canvas:
    """Attention with several heads (chapter 3)."""
    c = Canvas("Attention with several heads, and the shapes of its tensors", 520, language)
    columns, width = (65, 180, 295), 104
    low = c.box(180, 6, 180, "states x (B, T, D)", kind="data")
    c.line((180, low), (180, 52))
    for x in (columns[0], columns[2]):
        c.line((180, 41), (x, 41), (x, 52))
    for x, name in zip(columns, ("Q = x Wq", "K = x Wk", "V = x Wv"), strict=True):
        low = c.box(x, 52, width, name, shape="(B, T, D)")
        c.line((x, low), (x, 112))
        low = c.box(x, 112, width, "H heads", shape="(B, H, T, E)")
    c.line((columns[0], low), (columns[0], 174))
    c.line((columns[1], low), (columns[1], 174))
    low = c.box(122.5, 174, 219, "scores Q Kᵀ / √E", shape="(B, H, T, T)")
    c.line((122.5, low), (122.5, 234))
    low = c.box(122.5, 234, 219, "mask: −∞ where hidden", kind="choice")
    c.line((122.5, low), (122.5, 278))
    low = c.box(122.5, 278, 219, "softmax over the keys", shape="weights (B, H, T, T)")
    c.line((122.5, low), (122.5, 340))
    c.line((columns[2], 151), (columns[2], 340))
    low = c.box(180, 340, 334, "weighted mean of V", shape="(B, H, T, E)")
    c.line((180, low), (180, 400))
    low = c.box(180, 400, 180, "join the heads", shape="(B, T, D)")
    c.line((180, low), (180, 456))
    low = c.box(180, 456, 180, "· Wo")
    c.line((180, low), (180, 492))
    c.box(180, 492, 180, "output (B, T, D)", kind="data")
    return c


def block(language: str) -> Canvas:
    """Post-norm beside pre-norm (chapter 4)."""
    c = Canvas("A block with post-norm and a block with pre-norm", 372, language)
    for x, name, is_post in ((95, "post-norm (2017)", True), (265, "pre-norm", False)):
        c.text(x, 10, name, room=170)
        low = c.box(x, 22, 60, "x", kind="data")
        for part in ("self-attention", "feed-forward"):
            top = low
            first, second = (part, "norm") if is_post else ("norm", part)
            side = x - 72
            c.line((x, top), (x, top + 30))
            c.line(
                (x, top + 12),
                (side, top + 12),
                (side, top + (80 if is_post else 120)),
                (x - 8, top + (80 if is_post else 120)),
            )
            inner = c.box(x, top + 30, 110, first, kind="choice" if first == "norm" else "box")
            if is_post:
                c.line((x, inner), (x, top + 72))
                low = c.plus(x, top + 80)
                c.line((x, low), (x, top + 102))
                low = c.box(x, top + 102, 110, second, kind="choice")
            else:
                c.line((x, inner), (x, top + 72))
                inner = c.box(x, top + 72, 110, second)
                c.line((x, inner), (x, top + 112))
                low = c.plus(x, top + 120)
        c.line((x, low), (x, 340))
        c.box(x, 340, 60, "y", kind="data")
    return c


def transformer(language: str) -> Canvas:
    """Encoder and decoder (chapter 5)."""
    c = Canvas("The encoder and the decoder of the Transformer of 2017", 468, language)
    width, inside = 142, ("self-attention", "feed-forward")
    columns = (
        (90, 10, "encoder", "source ids (B, S)", inside),
        (270, 350, "decoder", "target ids (B, T)", (CAUSAL, "cross-attention", inside[1])),
    )
    ends = []
    for x, side, name, ids, sublayers in columns:
        c.text(x, 10, name, room=170)
        low = c.box(x, 22, width, ids, kind="data")
        c.line((x, low), (x, low + 14))
        low = c.box(x, low + 14, width, "embedding · √D\n+ positions")
        c.frame(x - 87, low + 9, 174, 12 + 80 * len(sublayers))
        c.text(x + (66 if side < x else -66), low + 19, "N ×", room=30)
        for sublayer in sublayers:
            top, edge = low, x + width / 2 * (1 if side > x else -1)
            c.line((x, top), (x, top + 26))
            low = c.box(x, top + 26, width, sublayer)
            c.line((x, low), (x, top + 62))
            c.line((x, top + 16), (side, top + 16), (side, top + 74), (edge, top + 74))
            low = c.box(x, top + 62, width, "add, norm", kind="choice")
        ends.append(low)
    x, low = columns[0][0] + width / 2, ends[0] - 12
    c.line((x, low), (180, low), (180, low - 34), (199, low - 34))
    c.text(180, low + 13, "K, V", room=40, kind="over")
    for text, kind in (("output layer, W = E", "box"), ("logits (B, T, V)", "data")):
        c.line((270, ends[1]), (270, ends[1] + 24))
        ends[1] = c.box(270, ends[1] + 24, width, text, kind=kind)
    return c


DRAWINGS: dict[str, Callable[[str], Canvas]] = {
    "positions": positions,
    "attention": attention,
    "block": block,
    "transformer": transformer,
}


class Drawing(nodes.General, nodes.Element):
    """A drawing as SVG."""


class Diagram(SphinxDirective):
    """A drawing of this module by its name."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        return [Drawing(svg=DRAWINGS[self.arguments[0]](self.config.language).render())]


def _visit(writer: Any, node: Drawing) -> None:
    writer.body.append(node["svg"])
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    """Add the directive and its node."""
    app.add_directive("diagram", Diagram)
    app.add_node(Drawing, html=(_visit, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
