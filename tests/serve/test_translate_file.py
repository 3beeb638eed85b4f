"""LibreTranslate's routes for files, by forms as its clients send them."""

import base64
import json
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib import error, request

import pytest

from document_samples import DOCX_RUNS, SRT, TEXTS, make_docx
from heedful.documents import FORMATS, read_document
from heedful.serve.errors import HttpError
from heedful.serve.multipart import fields_of
from running_server import running, wait_for_free_slots


def upload(served: Any, name: str, data: bytes, **fields: str) -> tuple[int, Any]:
    """The call of LibreTranslate's page and clients: a form with file, source and target."""
    boundary = uuid.uuid4().hex
    parts = [
        f'--{boundary}\r\nContent-Disposition: form-data; name="{key}"\r\n\r\n{value}\r\n'.encode()
        for key, value in fields.items()
    ]
    head = f'Content-Disposition: form-data; name="file"; filename="{name}"\r\n'
    head += "Content-Type: application/octet-stream\r\n\r\n"
    parts.append(f"--{boundary}\r\n{head}".encode() + data + b"\r\n")
    body = b"".join(parts) + f"--{boundary}--\r\n".encode()
    headers = {"Content-Type": f"multipart/form-data; boundary={boundary}"}
    sent = request.Request(served.url + "/translate_file", body, headers)
    return _answer(sent)


def _answer(sent: request.Request) -> tuple[int, Any]:
    try:
        with request.urlopen(sent, timeout=30) as answer:
            return answer.status, json.loads(answer.read())
    except error.HTTPError as refused:
        return refused.code, json.loads(refused.read())


def download(url: str) -> tuple[bytes, Any]:
    """The content of a translated file, and the headers."""
    with request.urlopen(url, timeout=20) as answer:
        return answer.read(), answer.headers


@pytest.mark.parametrize("name", ["a.po", "a.xlf", "a.srt", "a.html", "a.md", "a.txt"])
def test_a_file_is_translated_and_downloaded(served: Any, name: str) -> None:
    languages = 'source-language="de" target-language="en"'
    own = 'source-language="en" target-language="de"'
    data = TEXTS[name].replace(own, languages).encode()
    status, answer = upload(served, name, data, source="de", target="en")
    assert status == 200, answer
    content, headers = download(answer["translatedFileUrl"])
    assert headers["Content-Disposition"] == f"attachment; filename*=UTF-8''{name}"
    assert headers["Content-Type"] == "application/octet-stream"
    assert content != data
    read_document(content, name, ("de", "en"))
    wait_for_free_slots(served)


def test_the_texts_are_those_of_the_model(served: Any) -> None:
    model = served.models["de-en"]
    for source in ("de", "auto"):
        _, answer = upload(
            served, "ü b.txt", b"the cat sat\n\na dog ran", source=source, target="en"
        )
        content, headers = download(answer["translatedFileUrl"])
        expected = f"{model.translate('the cat sat')}\n\n{model.translate('a dog ran')}"
        assert content.decode() == expected
        assert headers["Content-Disposition"].endswith("%C3%BC_b.txt")


def test_a_file_has_terms_and_qualities(served: Any) -> None:
    text = 'msgid "the cat"\nmsgstr ""\n\nmsgid "a dog"\nmsgstr ""\n'
    more = {"source": "de", "target": "en", "quality": "true", "glossary": '{"cat": "zzz"}'}
    status, answer = upload(served, "a.po", text.encode(), **more)
    assert status == 400, "zzz has no token"
    more["glossary"] = '{"cat": "mat"}'
    status, answer = upload(served, "a.po", text.encode(), **more)
    content = download(answer["translatedFileUrl"])[0].decode()
    assert (status, content.count("# quality: ")) == (200, 2)
    assert "mat" in content or "the term cat is not" in content
    assert all(0 <= review["quality"] <= 100 for review in answer["reviews"])
    assert all(len(one["reasons"]) == len(one["reasonCodes"]) for one in answer["reviews"])
    status, answer = upload(served, "a.txt", b"the cat", **{**more, "glossary": "x"})
    assert (status, "glossary" in answer["error"]) == (400, True)


def test_the_answer_counts_and_names_what_to_review(served: Any) -> None:
    text = b"the cat\n\nthe cat 52\n"
    _, answer = upload(served, "a.txt", text, source="de", target="en")
    assert (answer["counts"]["segments"], answer["counts"]["to_review"]) == (2, 2)
    cut = "cut off by the length limit"  # as the net was not trained
    lacks = "not read, as the model's vocabulary lacks it: 5, 2"
    first, second = answer["reviews"]
    codes = [
        {"code": "unknown", "values": {"pieces": "5, 2"}},
        {"code": "cut", "values": {}},
        {"code": "missing", "values": {"pieces": "52"}},
    ]
    row = {"line": 1, "source": "the cat", "reasons": [cut], "reasonCodes": codes[1:2]}
    assert first == row
    row = {"line": 3, "source": "the cat 52", "reasons": [lacks, cut, "missing: 52"]}
    assert second == {**row, "reasonCodes": codes}


def test_progress_is_streamed(served: Any) -> None:
    lines = "\n".join(f"the cat {number}" for number in range(5)).encode()
    fields = {"file": base64.b64encode(lines).decode(), "filename": "a.txt", "stream": True}
    headers = {"Content-Type": "application/json"}

    def events(**more: str) -> list[Any]:
        """The events of an answer."""
        body = json.dumps({**fields, "target": "en", **more}).encode()
        sent = request.Request(f"{server.url}/translate_file", body, headers)
        with request.urlopen(sent, timeout=30) as answer:
            assert answer.headers["Content-Type"].startswith("text/event-stream")
            *found, last = answer.read().decode().removesuffix("\n\n").split("\n\n")
        assert last == "data: [DONE]"
        return [json.loads(one.removeprefix("data: ")) for one in found]

    with running({"de-en": served.models["de-en"]}, max_queue=8) as server:
        *progress, answer = events()
        assert [one["done"] for one in progress] == [0, 2, 4, 5]
        assert {one["segments"] for one in progress} == {5}
        _, whole = upload(server, "a.txt", lines, target="en")
        urls = [one.pop("translatedFileUrl") for one in (answer, whole)]
        assert download(urls[0])[0] == download(urls[1])[0]
        assert answer == whole


def test_a_binary_file_and_json(served: Any) -> None:
    data = make_docx(DOCX_RUNS)
    _, answer = upload(served, "a.docx", data, source="de", target="en")
    content, _ = download(answer["translatedFileUrl"])
    before, after = (read_document(file, "a.docx") for file in (data, content))
    assert len(before.segments) == len(after.segments)
    body = {"file": base64.b64encode(data).decode(), "filename": "a.docx", "target": "en"}
    headers = {"Content-Type": "application/json"}
    sent = request.Request(f"{served.url}/translate_file", json.dumps(body).encode(), headers)
    status, answer = _answer(sent)
    assert status == 200
    assert download(answer["translatedFileUrl"])[0] == content


@pytest.mark.parametrize(
    ("name", "data", "fields", "message"),
    [
        ("a.exe", b"x", {"target": "en"}, "Invalid request: file format not supported"),
        ("a.xlf", b"<a>", {"target": "en"}, "a.xlf, line 1, column 4: broken XML"),
        ("a.docx", b"PK", {"target": "en"}, "not a Word document"),
        ("a.xlf", TEXTS["a.xlf"].encode(), {"target": "en"}, "a.xlf is from en to de, not from"),
        ("a.txt", b"x", {"target": "fr", "source": "de"}, "fr is not supported"),
        ("a.txt", b"x", {"target": "en", "other": "x"}, "'other' is unknown"),
    ],
)
def test_wrong_files_are_refused(
    served: Any, name: str, data: bytes, fields: dict[str, str], message: str
) -> None:
    status, answer = upload(served, name, data, **fields)
    assert status == 400
    assert message in answer["error"]


def test_broken_forms_are_refused(served: Any) -> None:
    no_parts, broken = "no parts, or more than 100", "is broken, or a field is not UTF-8"
    for content_type, body, reason in (
        ("multipart/form-data", b"x", no_parts),
        ("multipart/form-data; boundary=a", b"x", no_parts),
        ("multipart/form-data; boundary=a", b"--a\r\n\r\nx\r\n--a--\r\n", broken),
        (
            "multipart/form-data; boundary=a",
            b'--a\r\nContent-Disposition: form-data; name="target"\r\n\r\n\xff\r\n--a--\r\n',
            broken,
        ),
        ("multipart/form-data; boundary=a", b"--a\r\n\r\n" * 500, no_parts),
        ("application/json", b'{"file": "%%%", "filename": "a.txt"}', "file: not Base64"),
    ):
        headers = {"Content-Type": content_type}
        sent = request.Request(f"{served.url}/translate_file", body, headers)
        status, answer = _answer(sent)
        assert (status, reason in answer["error"]) == (400, True), answer


def test_a_second_file_is_refused_and_a_second_text_is_not_lost(served: Any) -> None:
    """It took the place of the first one's name, and of two texts the first one was lost."""

    def sent(*parts: tuple[str, str], path: str = "/translate_file") -> tuple[int, Any]:
        body = "".join(
            f"--a\r\nContent-Disposition: form-data; {head}\r\n\r\n{text}\r\n"
            for head, text in parts
        )
        headers = {"Content-Type": "multipart/form-data; boundary=a"}
        return _answer(request.Request(served.url + path, f"{body}--a--\r\n".encode(), headers))

    target, file = ('name="target"', "en"), ('name="file"; filename="a.txt"', "the cat")
    assert sent(target, file)[0] == 200
    for name in ("file", "other"):
        status, answer = sent(target, file, (f'name="{name}"; filename="b.po"', "a dog"))
        assert (status, answer["error"]) == (400, "the form has several files: send one")
    texts = [('name="q"', "the cat"), ('name="q"', "a dog")]
    status, answer = sent(target, *texts, path="/translate")
    assert (status, len(answer["translatedText"])) == (200, 2)


def test_names_of_a_form_need_no_quotes() -> None:
    """As by .NET's clients, whose forms were refused as broken."""
    file = "file; filename=a.txt; filename*=utf-8''a.txt"
    body = "".join(
        f"--a\r\nContent-Disposition: form-data; name={name}\r\n\r\n{text}\r\n"
        for name, text in (("target", "en"), ('"q"', "the cat"), (file, "a dog"))
    )
    assert fields_of("multipart/form-data; boundary=a", f"{body}--a--\r\n".encode()) == [
        ("target", "en"),
        ("q", "the cat"),
        ("file", base64.b64encode(b"a dog").decode()),
        ("filename", "a.txt"),
    ]


@pytest.mark.parametrize("kind", ["multipart/mixed", "multipart/form-data", "message/rfc822"])
def test_the_content_of_a_part_is_not_parsed(kind: str) -> None:
    """Forms in forms took seconds, since every line was read once for each of them."""
    content = "".join(
        f"--b{depth}\r\nContent-Type: {kind}; boundary=b{depth + 1}\r\n\r\n" for depth in range(800)
    )
    content += "line\r\n" * 100_000
    head = f"Content-Disposition: form-data; name=q\r\nContent-Type: {kind}; boundary=b0\r\n\r\n"
    body = f"--a\r\n{head}{content}\r\n--a--\r\n".encode()
    assert fields_of("multipart/form-data; boundary=a", body) == [("q", content)]


def test_a_form_may_have_a_hundred_parts() -> None:
    part = b"--a\r\nContent-Disposition: form-data; name=q\r\n\r\n--ab\n--a-\r\n"
    assert (
        fields_of("multipart/form-data; boundary=a", part * 100 + b"--a--")
        == [("q", "--ab\n--a-")] * 100
    )
    with pytest.raises(HttpError, match="more than 100"):
        fields_of("multipart/form-data; boundary=a", part * 101 + b"--a--")


def test_an_unknown_file_is_404(served: Any) -> None:
    for name in ("x.po", "..%2f..%2fetc%2fpasswd"):
        sent = request.Request(f"{served.url}/download_file/{name}")
        assert _answer(sent)[0] == 404


def test_the_settings_of_the_page_name_the_formats(served: Any) -> None:
    _, settings = _answer(request.Request(f"{served.url}/frontend/settings"))
    assert settings["filesTranslation"] is True
    assert settings["supportedFilesFormat"] == list(FORMATS)


def test_a_key_is_needed_for_a_translation_and_not_for_its_download(
    served: Any, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("a-key-of-a-user\n")
    with running({"de-en": served.models["de-en"]}, keys) as server:
        assert upload(server, "a.srt", SRT.encode(), target="en")[0] == 401
        fields = {"target": "en", "api_key": "a-key-of-a-user"}
        status, answer = upload(server, "a.srt", SRT.encode(), **fields)
        assert status == 200
        assert b"-->" in download(answer["translatedFileUrl"])[0]


def test_documents_leave_room_for_each_other(served: Any) -> None:
    """More texts than the queue holds are translated part by part, also by several requests."""
    lines = [f"the cat {number}" for number in range(40)]
    model = served.models["de-en"]
    data = "\n".join(lines).encode()
    with running({"de-en": model}, max_queue=8) as server, ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda _: upload(server, "a.txt", data, target="en"), range(3)))
        contents = {download(answer["translatedFileUrl"])[0] for _, answer in answers}
        wait_for_free_slots(server)
    assert contents == {"\n".join(model.translate(lines)).encode()}


def test_old_files_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    from heedful.serve import documents

    files = documents.Files()
    first = files.add("a", bytes(10))
    monkeypatch.setattr(documents, "_KEPT_BYTES", 15)
    second = files.add("b", bytes(10))
    assert files.get(first) is None
    assert files.get(second) is not None
    monkeypatch.setattr(documents.time, "monotonic", lambda: float("inf"))
    assert files.get(second) is None
