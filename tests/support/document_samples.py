"""A small document of each format, and translators that are functions of a text."""

import io
import zipfile
from collections.abc import Callable, Sequence
from typing import Any, Literal

from heedful.documents import Counts, Document, Policy, read_document, translate_document
from heedful.pipelines.generations import Generation


class Stub:
    """A translator that is a function of a text; `seen` are the texts."""

    def __init__(self, translate: Callable[[str], str] = str) -> None:
        self._translate = translate
        self.seen: list[str] = []

    def translate(
        self, texts: list[str], *, return_details: Literal[True], **options: Any
    ) -> list[list[Generation]]:
        """The function of each text."""
        self.seen += texts
        return [[Generation(self._translate(text), [], 0.0, 0.0, True)] for text in texts]


def translated(
    name: str,
    data: str | bytes,
    translate: Callable[[str], str] = str,
    languages: tuple[str | None, str | None] = ("en", "de"),
    **options: Any,
) -> tuple[bytes, Counts, Document]:
    """The translated file, the counts and the document."""
    data = data.encode() if isinstance(data, str) else data
    document = read_document(data, name, languages)
    counts = translate_document(Stub(translate), document, **options)
    return document.to_bytes(), counts, document


def as_text(content: tuple[bytes, Counts, Document]) -> str:
    """The translated file of `translated` as text."""
    return content[0].decode()


OVERWRITE = Policy(overwrite=True)

PO = r"""# Comment
msgid ""
msgstr ""
"Project-Id-Version: x\n"
"Content-Type: text/plain; charset=UTF-8\n"

#. extracted
#: a.c:1
#, c-format
msgid "Hello %s.\nBye"
msgstr ""

msgctxt "menu"
msgid ""
"long "
"text"
msgstr ""

msgid "one file"
msgid_plural "%d files"
msgstr[0] ""
msgstr[1] ""

#, fuzzy
#| msgid "older"
msgid "old"
msgstr "alt"

msgid "kept"
msgstr "behalten"

#~ msgid "gone"
#~ msgstr "weg"
"""
XLIFF = """<?xml version="1.0" encoding="UTF-8"?>
<!-- a comment -->
<xliff version="1.2" xmlns="urn:oasis:names:tc:xliff:document:1.2">
 <file original="a" source-language="en" target-language="de" datatype="plaintext"><body>
  <trans-unit id="1">
    <source>Click <g id="1">here &amp; now</g>. Then <x id="2"/> go.</source>
  </trans-unit>
  <trans-unit id="2"><source><g id="1">All bold</g></source><target/></trans-unit>
  <trans-unit id="3"><source>Three</source><target state="final">Drei</target></trans-unit>
  <trans-unit id="4"><source>Four</source><target state="new">Four</target></trans-unit>
  <trans-unit id="5" translate="no"><source>Five</source></trans-unit>
 </body></file>
</xliff>
"""
XLIFF2 = """<xliff version="2.1" srcLang="en" xmlns="urn:oasis:names:tc:xliff:document:2.0">
<file id="f"><unit id="1">
  <originalData><data id="d1">x</data></originalData>
  <segment>
    <source>Hello <pc id="1">you</pc></source>
  </segment>
  <segment state="final"><source>Two</source><target>Zwei</target></segment>
</unit></file></xliff>
"""
TMX = """<?xml version="1.0"?>
<!DOCTYPE tmx SYSTEM "tmx14.dtd">
<tmx version="1.4"><header srclang="en"/><body>
<tu>
  <tuv xml:lang="en-US"><seg>Hi <bpt i="1">&lt;b></bpt>you<ept i="1">&lt;/b></ept></seg></tuv>
</tu>
<tu><tuv xml:lang="EN"><seg>Two</seg></tuv><tuv xml:lang="de-DE"><seg>Zwei</seg></tuv></tu>
</body></tmx>
"""
SRT = (
    "1\r\n00:00:01,000 --> 00:00:02,000\r\nHello my\r\n<i>dear</i> friend\r\n\r\n"
    "2\r\n00:00:03,000 --> 00:00:04,500\r\n- Yes.\r\n- No.\r\n"
)
VTT = """WEBVTT

NOTE a
b --> c

id
00:01.000 --> 00:02.000 align:left
<v Ann>Hi <b>you</b>
"""
HTML = """<!DOCTYPE html>
<html><head><title>My page</title><script>var a="<b>";</script></head>
<body><h1>Hello</h1><p>This is <b>bold</b> &amp; <a href="x">a
   link</a>. Caf&eacute;!<br>Next <code>x=1</code> line</p>
<p translate="no">Keep</p><!-- c --> tail</body></html>
"""
MARKDOWN = """---
title: x
---
# Hello *world*

A para with `code` and a [link](http://x.y/a_b "t")
continued here. See **bold** text.

> quote one
> two

1. item 1
2. item <b>two</b>

| A | B |
|---|---|
| c1 | c **2** |

```
code
```
"""
PLAIN = "Hello there. How are you?\r\n\r\n  Fine  \nlast"

TEXTS = {
    "a.po": PO,
    "a.xlf": XLIFF,
    "b.xliff": XLIFF2,
    "a.tmx": TMX,
    "a.srt": SRT,
    "a.vtt": VTT,
    "a.html": HTML,
    "a.md": MARKDOWN,
    "a.txt": PLAIN,
}


def make_docx(paragraphs: Sequence[Sequence[tuple[str, bool]]]) -> bytes:
    """A document of Word with paragraphs of runs, each bold or not."""
    import docx

    document = docx.Document()
    for runs in paragraphs:
        paragraph = document.add_paragraph()
        for text, is_bold in runs:
            paragraph.add_run(text).bold = is_bold or None
    out = io.BytesIO()
    document.save(out)
    return out.getvalue()


DOCX_RUNS = [
    [("Some ", False), ("bold", True), (" text & more. ", False), ("Sec", False), ("ond.", False)],
    [("All bold", True)],
    [],
]


def make_zip(parts: dict[str, bytes]) -> bytes:
    """A ZIP file."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in parts.items():
            file.writestr(name, content)
    return out.getvalue()
