"""Makes docs/_static/fonts/STIXTwoMath.woff2, the font of the formulas.

    python docs/make_math_font.py FILE

FILE is `files/stix-two-math-latin-400-normal.woff2` of npm's @fontsource/stix-two-math 5.3.0:
STIX Two Math 2.12 (https://github.com/stipub/stixfonts), under the SIL Open Font License 1.1, which
reserves no name. It needs fonttools and brotli, which nothing else does.
"""

import sys
from pathlib import Path
from typing import Any

from fontTools.misc.transform import Transform
from fontTools.pens.recordingPen import DecomposingRecordingPen
from fontTools.pens.transformPen import TransformPen
from fontTools.pens.ttGlyphPen import TTGlyphPen
from fontTools.subset import Options, Subsetter
from fontTools.ttLib import TTFont

FONT = Path(__file__).resolve().parent / "_static" / "fonts" / "STIXTwoMath.woff2"
ROOT = 0x221A
RANGES = (  # of Unicode: letters with accents, Greek, punctuation, arrows, operators, alphabets
    *((0x20, 0x7E), (0xA0, 0xFF), (0x131, 0x131), (0x237, 0x237), (0x2C6, 0x2DC), (0x300, 0x308)),
    *((0x30A, 0x30C), (0x338, 0x338), (0x391, 0x3C9), (0x3D1, 0x3F5), (0x2010, 0x2044)),
    *((0x2061, 0x2064), (0x20D7, 0x20D7), (0x2102, 0x2131), (0x2190, 0x22FF), (0x2308, 0x230B)),
    *((0x2329, 0x232A), (0x23B4, 0x23B5), (0x23DC, 0x23E1), (0x27E6, 0x27EB), (0x27F5, 0x27FF)),
    *((0x2A00, 0x2A02), (0x2A7D, 0x2A7E), (0x1D400, 0x1D4CF), (0x1D538, 0x1D56B)),
    *((0x1D6A4, 0x1D71B), (0x1D7CE, 0x1D7E1)),
)


def main(source: str) -> None:
    """Keep the characters of `RANGES`, with their larger forms, and write the font."""
    font = TTFont(source)
    options = Options(layout_features=["*"], hinting=False, flavor="woff2")
    subsetter = Subsetter(options)
    subsetter.populate(unicodes=[code for a, b in RANGES for code in range(a, b + 1)])
    subsetter.subset(font)
    narrow_roots(font)
    font.flavor = "woff2"
    font.save(FONT)


def narrow_roots(font: TTFont) -> None:
    """Give the larger forms of the root the width of the smallest.

    Chromium reserves the width of the widest form for each root, which leaves a gap behind others.
    """
    root = font.getBestCmap()[ROOT]
    variants = font["MATH"].table.MathVariants
    index = variants.VertGlyphCoverage.glyphs.index(root)
    found: Any = variants.VertGlyphConstruction[index]
    names = {record.VariantGlyph for record in found.MathGlyphVariantRecord}
    names |= {record.glyph for record in found.GlyphAssembly.PartRecords}
    width, glyphs = font["hmtx"][root][0], font.getGlyphSet()
    for name in sorted(names - {root}):
        old, bearing = font["hmtx"][name]
        pen = TTGlyphPen(None)
        outline = DecomposingRecordingPen(glyphs)
        glyphs[name].draw(outline)
        outline.replay(TransformPen(pen, Transform(width / old, 0, 0, 1, 0, 0)))
        font["glyf"][name] = pen.glyph()
        font["hmtx"][name] = width, round(bearing * width / old)


if __name__ == "__main__":
    main(sys.argv[1])
    print(f"wrote {FONT.name}, {FONT.stat().st_size:,} bytes")
