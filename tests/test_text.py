"""One reader of somebody's text: encodings, csv, json and pickles as they should not be."""

import json
import pickle
import pickletools
import sys

from contrastive import engine
from contrastive.engine.base import UserError
from contrastive.readers import text

import numpy as np
import pytest

DEEP = "[" * 200_000 + "]" * 200_000


def written(tmp_path, content):
    path = tmp_path / "somebody's file"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def refused(work, path, *words):
    with pytest.raises(UserError) as error:
        work(path)
    said = str(error.value)
    assert str(path) in said and "\n" not in said and len(said) < 500 and all(w in said for w in words), said


def rows(path):
    return list(text.csv_rows(path, ["id", "caption"]))


@pytest.mark.parametrize("content, found", [
    ("id,caption\n1,a cat\n", [(2, {"id": "1", "caption": "a cat"})]),
    (b"\xef\xbb\xbfid,caption\r\n1,a cat\r\n", [(2, {"id": "1", "caption": "a cat"})]),  # a byte order mark
    ('\nid, caption\n\n1,"a ""big""\ncat"\n2,b', [(4, {"id": "1", "caption": 'a "big"\ncat'}),
                                                  (6, {"id": "2", "caption": "b"})]),
    (f"id,caption\n1,{'x' * 300_000}\n", [(2, {"id": "1", "caption": "x" * 300_000})]),
    ("id,caption\n1,a\u2028cat\x0b\n", [(2, {"id": "1", "caption": "a\u2028cat\x0b"})]),
    ("caption,id,more\na,1,2\n", [(2, {"id": "1", "caption": "a", "more": "2"})])])
def test_a_csv(content, found, tmp_path):
    assert rows(written(tmp_path, content)) == found


@pytest.mark.parametrize("content, words", [
    ("", ["has no column id, caption"]), ("\n\n", ["has no column"]), ("id,word\n1,a\n", ["has no column caption"]),
    ("id,caption\n1,a\n2\n", ["line 3", "1 fields", "header has 2"]),
    ("id,caption\n1,a,b\n", ["line 2", "3 fields"]),
    ('id,caption\n1,a\n2,"a cat\n3,b\n', ["line 3", "never closed"]),
    (b"id,caption\n1,a\n2,caf\xe9\n", ["line 3", "save it as UTF-8"]),
    ("id,caption\n1,a\n".encode("utf-16"), ["UTF-16"]),
    (b"id,caption\n1,\0\n", ["zeros"])])
def test_a_csv_that_is_refused(content, words, tmp_path):
    refused(rows, written(tmp_path, content), *words)


@pytest.mark.parametrize("content, words", [
    ("", ["not JSON"]), ('{"a": 1', ["not JSON", "is it whole?"]), (DEEP, ["nested too deep"]),
    (b'["caf\xe9"]', ["line 1", "save it as UTF-8"]), ("[9" + "9" * 5000 + "]", ["not JSON"])])
def test_json_that_is_refused(content, words, tmp_path):
    refused(text.read_json, written(tmp_path, content), *words)


def test_half_a_letter_becomes_a_mark_and_is_said(tmp_path, capsys):
    engine.base.say_once.cache_clear()
    path = written(tmp_path, '{"a": ["\\ud800 cat", 1, "\\ud83d\\ude00"]}')
    assert text.read_json(path) == {"a": ["\ufffd cat", 1, "\U0001f600"]}
    assert "half of a surrogate pair" in capsys.readouterr().out
    assert text.read_json(written(tmp_path, '["\\ud83d\\ude00"]')) == ["\U0001f600"]
    assert not capsys.readouterr().out


def test_a_file_that_is_not_there_and_one_whose_name_is_too_long(tmp_path):
    refused(text.read_text, tmp_path / "none", "cannot be read")
    with pytest.raises(UserError, match="cannot be read"):
        text.read_lines(tmp_path / ("x" * 5000))


@pytest.mark.parametrize("value, found", [(3, 3), ("3", 3), (3.0, 3), ("-1", -1), (1.9, None), ("1.9", None),
                                          (True, None), (None, None), ("", None), (float("nan"), None),
                                          ("1e999", None), ("9" * 400, None), ([1], None)])
def test_whole_numbers(value, found, tmp_path):
    if found is not None:
        assert text.whole_number(value) == found == text.number(value)
        return
    with pytest.raises(UserError, match="another layout"), text.expected_layout(tmp_path):
        text.whole_number(value)


# ------------------------------------------------ pickles -----------------------------------------------------------
@pytest.mark.parametrize("protocol", range(5))
def test_plain_values_and_arrays_are_read(protocol, tmp_path):
    value = {"a": [1, 2.5, "x", b"y", {3}, None], "b": np.arange(6, dtype=np.float32).reshape(2, 3),
             "c": np.float64(2), "d": np.array(["one", "two"])}
    found = text.load_plain_pickle(written(tmp_path, pickle.dumps(value, protocol)))
    assert found.keys() == value.keys() and found["a"][:3] == value["a"][:3]
    assert all(np.array_equal(found[k], value[k]) for k in "bcd")
    old = pickle.dumps(value, protocol).replace(b"numpy._core.", b"numpy.core.")  # as numpy 1 writes it
    if protocol < 4:  # no lengths before names
        assert np.array_equal(text.load_plain_pickle(written(tmp_path, old))["b"], value["b"])


class Calls:
    def __init__(self, function, *arguments):
        self.what = function, arguments

    def __reduce__(self):
        return self.what


def test_nothing_else_is_imported_or_called(tmp_path, monkeypatch):
    (tmp_path / "numpyevil.py").write_text("raise SystemExit('run')\ndef ndarray(): pass")
    monkeypatch.syspath_prepend(str(tmp_path))
    for code in (b"cnumpyevil\nndarray\n(tR.", b"cnumpy.testing\nrundocs\n(tR.", b"cos\nsystem\n(S'true'\ntR.",
                 b"cbuiltins\neval\n(S'1'\ntR.", b"cnumpy\nload\n(S'x'\ntR."):
        pickletools.dis(code, out=open(tmp_path / "said", "w"))                # it is a pickle
        refused(text.load_plain_pickle, written(tmp_path, code), "asks for", "only plain data")
    assert "numpyevil" not in sys.modules


@pytest.mark.parametrize("content", [
    b"", b"\x80", b"no pickle", b"\x80\x04\x95", pickle.dumps(list(range(1000)))[:-5], b"cnumpy\nndarray\n(tR.",
    b"cnumpy\ndtype\n(S'no such'\ntR.", b"cnumpy._core.multiarray\nscalar\n(tR.", b"]I1\na0a."])
def test_a_pickle_that_is_cut_or_odd(content, tmp_path):
    refused(text.load_plain_pickle, written(tmp_path, content), "not a readable pickle")


def test_what_is_deeply_nested_does_not_end_in_a_traceback(tmp_path):
    path = written(tmp_path, b"]" * 100_000 + b"a" * 99_999 + b".")
    with pytest.raises(UserError, match="another layout"), text.expected_layout(path):
        json.dumps(text.load_plain_pickle(path))
