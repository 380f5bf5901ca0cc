"""People see no secret of a URL and no control character."""

import pickle

import pytest

from vlightning.common.errors import UserError
from vlightning.common.shown import VARIABLE, public, shown

URLS = {
    "http://bob:SECRET@host:80/a/t.tar?X-Amz-Credential=SECRET/b&X-Amz-Signature=SECRET": "http://host:80/a/t.tar",
    "https://SECRET@host/t.tar#SECRET": "https://host/t.tar",
    "https://host?token=SECRET@x": "https://host",
    "https://bob:SE?CR#ET/SECRET@host/x": "https://host/x",
    "http://[::1]:80/a@b.tar?SECRET": "http://[::1]:80/a@b.tar",
    "http://host/t.tar?SECRET#bytes=512-1024": "http://host/t.tar#bytes=512-1024",
    "simplecache::http://bob:SECRET@host/t.tar?sig=SECRET::SECRET": "simplecache::http://host/t.tar",
    "zip://a.csv::https://bob:SECRET@host/t.zip?SECRET": "zip://a.csv::https://host/t.zip",
    "s3://AKIA:SEC/RET+SECRET@bucket/*.tar": "s3://bucket/*.tar",
    "s3://bucket/t.tar?sig=SECRET": "s3://bucket/t.tar",
    "s3://bucket/shard-?.tar": "s3://bucket/shard-?.tar",
    "abfs://container@account.dfs.core.windows.net/t.tar": "abfs://container@account.dfs.core.windows.net/t.tar",
    "/home/bob/what?.tar": "/home/bob/what?.tar",
}


@pytest.mark.parametrize("url", URLS)
def test_a_url_is_shown_without_its_secrets_alone_and_in_a_sentence(url):
    assert public(url) == URLS[url]
    for sentence in ("Expected a file at '{}', got none: give another.", "Read {}, then {}: correct it.", "({})"):
        assert public(sentence.format(url, url)) == sentence.format(URLS[url], URLS[url])


def test_a_known_secret_is_shown_nowhere_whatever_is_in_it(monkeypatch):
    url = "http://bob:it's a SECRET@host/t.tar?SEC'RET"
    monkeypatch.setenv(VARIABLE, f"http://host/other {url}")
    assert public(f"Reading {url} failed") == "Reading http://host/t.tar failed"


def test_a_name_is_one_line_without_escape_codes():
    assert shown("été 図\x1b]0;x\x07\nvlightning: error\u202e\udc80") == (
        r"été 図\x1b]0;x\x07\nvlightning: error\u202e\udc80"
    )


def test_an_error_for_users_is_one_line_without_secrets_and_survives_a_process():
    error = UserError("Expected a file, got 'http://bob:SECRET@host/x?SECRET' and \x1b[2J:\n  give another.")
    text = r"Expected a file, got 'http://host/x' and \x1b[2J: give another."
    assert str(error) == str(pickle.loads(pickle.dumps(error))) == text
