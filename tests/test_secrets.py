"""No secret of an address, of the environment or of a login leaves the process: in a message, a traceback, a log or a file."""

from __future__ import annotations

import copy
import functools
import http.server
import itertools
import json
import logging
import os
import pickle
import re
import subprocess
import sys
import threading
import traceback
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, quote, unquote, urlsplit

import pytest
import typer.main
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from arrowbank import ScanConfig, open_bank, pull, push, scan, secrets
from arrowbank.bank.remote.addresses import know_secrets_of, parse_address
from arrowbank.cli import main
from arrowbank.cli.first import interrupted
from arrowbank.errors import ArrowbankError, InputError, RemoteError
from tests import s3_server
from tests.banks import make_texts
from tests.kill import tree_bytes

ONE_TREE = functools.cache(typer.main.get_command)  # built for every call it costs more than most of what is tried
ROOT = Path(__file__).parents[1]
PASSWORDS = [
    "tr0ub4dor",
    "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLE",
    "two words of it",
    "s@cr-et!",
    "pa:ss:wd",
    "qu4ck?fr4g#zz",
    "umläut-ключ-鍵",
    'it\'s "quoted"',
    "back\\slash",
    "percent%2Fsign",
    "a/b@c/d@e-12",
    "//dou//ble//",
]


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    with secrets.forgetting():
        yield


def pieces(password: str) -> list[str]:
    """What of a password may not be seen: itself, as it is decoded and encoded, and what a path would cut it into."""
    forms = {
        password,
        unquote(password),
        quote(password, safe=""),
        quote(password),
        repr(password)[1:-1],
        json.dumps(password)[1:-1],
    }
    cut = {piece for form in list(forms) for piece in form.replace("@", "/").replace("?", "/").replace("#", "/").split("/")}
    return [form for form in forms | cut if len(form) >= 4]


def assert_hidden(text: str, password: str) -> None:
    for piece in pieces(password):
        assert piece not in text, f"{piece!r} in {text!r}"


# addresses


@pytest.mark.parametrize("password", PASSWORDS)
@pytest.mark.parametrize("encoded", [False, True])
@pytest.mark.parametrize("scheme", ["s3", "https", "ftp", "memory", "gs"])
def test_an_address_shows_no_secret_in_any_form(password: str, encoded: bool, scheme: str) -> None:
    written = quote(password, safe="") if encoded else password
    value = f"{scheme}://AKIAUSERUSER:{written}@bucket/a/folder"
    try:
        address = parse_address(value)
    except ArrowbankError as error:
        assert_hidden(f"{error}{error!r}{error.args}", password)
        assert scheme == "gs" or not encoded  # what is encoded is never ambiguous
        return
    assert address.url == f"{scheme}://bucket/a/folder"
    assert address.login.reveal() == ("AKIAUSERUSER", unquote(written))
    shown = f"{address} {address!r} {address.shown} {vars(address)} {address.login} {address.login!r:>20}"
    assert_hidden(shown, password)
    assert "AKIAUSERUSER" not in shown
    for way in (pickle.dumps(address), pickle.dumps(address, 0)):
        assert_hidden(way.decode("latin-1"), password)
        assert pickle.loads(way).url == address.url  # noqa: S301
    assert copy.deepcopy(address) == address
    with pytest.raises(ValueError, match="address=Address") as caught:
        raise_with(address)
    assert_hidden(str(caught.value), password)


def raise_with(address: object) -> None:
    """ValueError with the last frame of a traceback as tools print it that show local variables."""
    try:
        raise KeyError(address)
    except KeyError as error:
        shown = traceback.TracebackException.from_exception(error, capture_locals=True)
        raise ValueError("".join(shown.format()).replace(" = ", "=")) from None


# a slash in a user that is written as it is makes a path of all that follows: as a path it is shown
TYPED = st.characters(categories=["L", "N", "P", "S", "Zs"])


@pytest.mark.parametrize("value", ["http://host:8080/org@v1/bank", "ftp://host:21/@bank", "sftp://host:22/bank@2"])
def test_digits_ahead_of_a_path_are_a_port_though_an_at_sign_follows(value: str) -> None:
    address = parse_address(value)
    assert (address.url, address.login.reveal()) == (value, None)


@settings(deadline=None)
@given(
    st.sampled_from(["s3", "s3a", "http", "https", "ftp", "sftp", "memory", "gs", "abfs", "hf", "simplecache::s3", "nosuch"]),
    st.text(TYPED, min_size=1, max_size=12).filter(lambda user: not set(user) & set("/?#")),
    st.text(TYPED, min_size=8, max_size=30),
    st.booleans(),
)
# read from the left, each has a host and its port
@example("s3", "@", "0000123#", False)
@example("s3", "0@", "0000123#", False)
@example("http", "0", "0000123#", False)
@example("abfs", "@", "0000123#", False)
@example("s3", "A", "/000123/", False)  # `A:/` is no scheme here
def test_whatever_the_secret_no_message_shows_it(scheme: str, user: str, password: str, encoded: bool) -> None:
    assume(len(set(password)) > 4 and not password.isdecimal())
    assume(not any(piece in f"{scheme}://bucket/folder?*** {WORDS}" for piece in pieces(password)))
    assume(encoded or not re.match(r"\d+[/?]", password))  # host and port: the test above
    written = quote(password, safe="") if encoded else password
    with secrets.forgetting():
        value = f"{scheme}://{user}:{written}@bucket/folder"
        know_secrets_of(value)
        try:
            said = parse_address(value).shown
        except ArrowbankError as error:
            said = str(error)
        assert password not in said
        assert written not in said
        for text in (f"cannot open {value}", f"no such file: {Path(value)}", f"{value!r}", quote(value), json.dumps(value)):
            assert password not in secrets.hide(text)
            assert written not in secrets.hide(text)


WORDS = "cannot open no such file: where user and password end is not clear"


@pytest.mark.parametrize(
    "query",
    [
        "X-Amz-Signature=0123456789abcdef&X-Amz-Credential=AKIA%2F2026&X-Amz-Expires=3600",
        "token=abcd1234",
        "sv=2024&sig=a%2Bb%3D9876",
        "justthetoken",
    ],
)
def test_a_query_is_hidden_as_a_whole(query: str) -> None:
    address = parse_address(f"https://host/folder?{query}")
    assert (address.shown, address.query.reveal()) == ("https://host/folder?***", query)
    assert query not in f"{address!r}{pickle.dumps(address)!r}"
    for text in (f"Max retries exceeded with url: /folder?{query}", f"GET https://host/folder/manifest.json?{query} HTTP/1.1"):
        assert query not in secrets.hide(text)
    with pytest.raises(InputError, match="a folder has no query there") as caught:
        parse_address(f"s3://bucket/folder?{query}")
    assert query not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "s3://ada:tr0ub4dor@bucket/x: no such folder",
        "s3:/ada:tr0ub4dor@bucket/x: no such folder",
        "[Errno 2] No such file or directory: '/work/s3:/ada:tr0ub4dor@bucket/x'",
        "see https://host/x?token=tr0ub4dor. Then go on",
        "s3://ada:tr0/ub4dor@bucket/x is there",
    ],
)
def test_what_looks_like_a_secret_is_hidden_where_nobody_knew_it(text: str) -> None:
    said = str(InputError(text))
    assert "dor" not in said
    assert said.endswith(text.split()[-1].rpartition("@")[2])


@pytest.mark.parametrize(
    "text",
    [
        "http://127.0.0.1:8080/org/name@main: no such revision",
        "hf://datasets/org/name@refs/pr/1: not there. Ask ada@example.com",
        "line 3, column 11: not JSON (Expecting value)",
        "ab@cd: a text with a@b in it, and http://host/a/b@c",
    ],
)
def test_what_is_no_secret_is_left_alone(text: str) -> None:
    assert str(InputError(text)) == text


# commands


@pytest.fixture
def bank(tmp_path: Path) -> Path:
    make_texts(tmp_path / "texts", 12, shard_rows=4)
    return tmp_path / "texts"


def command_lines(place: str) -> list[list[str]]:
    """Every verb, with an address wherever it takes a path, a name or a text; none of them can succeed."""
    return [
        ["push", "BANK", place],
        ["push", place, "org/name"],
        ["pull", place, "OUT"],
        ["pull", "org/name", place],
        ["info", place],
        ["verify", place],
        ["verify", place, "--quick"],
        ["report", place, "--out", "OUT.html"],
        ["report", "BANK", "--out", place],
        ["lookup", place, "a text"],
        ["search", place, "a text"],
        ["compare", place, "BANK"],
        ["estimate", place, "--model", "m"],
        ["audit", place, "BANK"],
        ["audit", "BANK", "--source", f"a={place}", "--source", f"b={place}"],
        ["scan", "--source", f"t={place}", "--out", "OUT"],
        ["scan", "--source", place, "--out", "OUT"],
        ["scan", "--source", "t=FILE", "--out", place],
        ["scan", "--source", "t=FILE", "--onto", place, "--out", "OUT"],
        ["tokenize", place, "--tokenizer", "m", "--out", "OUT"],
        ["tokenize", "BANK", "--tokenizer", place, "--out", "OUT"],
        ["encode", place, "--model", "m", "--out", "OUT"],
        ["encode", "BANK", "--model", place, "--out", "OUT"],
        ["encode", "BANK", "--encoder", place, "--out", "OUT"],
        ["build", "--source", f"t={place}", "--model", "m", "--out", "OUT"],
        ["merge", place, "BANK", "--out", "OUT"],
        ["merge", "BANK", "BANK", "--out", place],
        ["select", place, "--limit", "1", "--out", "OUT"],
        ["select", "BANK", "--where", place, "--out", "OUT"],
        ["select", "BANK", "--texts", place, "--limit", "1", "--out", "OUT"],
        ["export", place, "--to", "parquet", "--out", "OUT"],
        ["export", "BANK", "--to", place, "--out", "OUT"],
        ["targets", "import", place, "--target-model", "m", "--layers", "1", "--out", "OUT"],
        ["targets", "capture", "--model", place, "--source", place, "--layers", "1", "--out", "OUT"],
        ["targets", "verify", place],
        ["targets", "verify", "BANK", "--model", place],
        ["targets", "vocab", place, "--out", "OUT"],
        ["in2", "build", "--filler", place, "--arm", "a", "--length", "600", "--examples", "2", "--out", "OUT"],
        ["in2", "verify", place],
        ["in2", "probes", "--filler", place, "--length", "300", "--out", "OUT"],
        ["in2", "score", place, "--model", "m", "--out", "OUT"],
        ["trunk", "build", "--model", "m", "--source", f"a={place}", "--out", "OUT"],
        ["trunk", "build", "--model", place, "--source", "a=BANK", "--out", "OUT"],
        ["heal", "--trunk", place, "--model", "m", "--out", "OUT"],
        ["heal", "--trunk", "BANK", "--model", place, "--out", "OUT"],
        ["heal", "--trunk", "BANK", "--model", "m", "--also", f"nf4={place}", "--out", "OUT"],
        ["demo", "--episodes", place],
        ["merge", "BANK", "--workers", place],
        [place],
        ["info", "BANK", "--" + place],
        ["info", "BANK", place],
    ]


@pytest.mark.parametrize("number", range(len(command_lines(""))), ids=lambda number: " ".join(command_lines("")[number][:2]))
def test_no_command_prints_the_secrets_that_it_is_given(
    number: int, bank: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr("typer.main.get_command", ONE_TREE)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    (tmp_path / "file.jsonl").write_text('{"query": "a text"}\n')
    names = {
        "BANK": str(bank),
        "FILE": "file.jsonl",
        "OUT": "out",
        "OUT.html": "out.html",
        "t=FILE": "t=file.jsonl",
        "a=BANK": f"a={bank}",
    }
    extras = itertools.cycle(([], ["--debug"], ["--json"], ["--debug"]))
    for password in ("tr0ub4dor", "tw0 w0rds/4nd sl4shes", "s@cr-et/of-more"):
        for place in (f"s3://AKIAUSERUSER:{password}@bucket/folder", f"http://127.0.0.1:1/folder?sig={quote(password)}"):
            argv = [names.get(word, word) for word in command_lines(place)[number]] + next(extras)
            try:
                code = main(argv)
            except ArrowbankError as error:  # --debug: the interpreter prints it, behind `hide_output`
                code = error.exit_code
                print(secrets.hide(str(error)), file=sys.stderr)
            said = capsys.readouterr()
            assert code in (0, 1, 2), said.err
            assert_hidden(said.out + said.err, password)
            assert "AKIAUSERUSER" not in said.out + said.err
            assert_hidden(interrupted(argv), password)


@pytest.mark.slow
def test_a_whole_process_prints_no_secret_to_its_end(tmp_path: Path) -> None:
    password = "tw0 w0rds/4nd@sl4shes"
    log = "import logging; logging.basicConfig(level=logging.DEBUG)\n"
    (tmp_path / "sitecustomize.py").write_text(log)  # the clients log what they send
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "AWS_ENDPOINT_URL": "http://127.0.0.1:1"}
    environment |= {"AWS_MAX_ATTEMPTS": "1", "HF_TOKEN": "hf_abcdefgh12345678", "AWS_SECRET_ACCESS_KEY": "ofTheEnvironment1"}
    for place in (
        f"s3://AKIAUSERUSER:{quote(password, safe='')}@bucket/folder",
        f"http://ada:{quote(password, safe='')}@127.0.0.1:1/x?sig=tr0ub4dor",
    ):
        argv = [sys.executable, "-X", "dev", "-W", "always", "-m", "arrowbank", "pull", place, str(tmp_path / "out"), "--debug"]
        done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode in (1, 2), done.stderr
        assert "Traceback" in done.stderr
        for hidden in (password, "hf_abcdefgh12345678", "ofTheEnvironment1", "tr0ub4dor"):
            assert_hidden(done.stdout + done.stderr, hidden)


def test_what_libraries_log_is_hidden_where_python_is_used(caplog: pytest.LogCaptureFixture) -> None:
    parse_address("https://ada:tr0ub4dor@host/folder?sig=9f8e7d6c5b4a")
    with caplog.at_level(logging.DEBUG):
        logging.getLogger("urllib3.connectionpool").debug(
            "%s://%s%s", "https", "ada:tr0ub4dor@host", "/folder?sig=9f8e7d6c5b4a"
        )
        logging.getLogger("botocore.auth").debug("Authorization: Basic %s", b64encode(b"ada:tr0ub4dor").decode())
        try:
            raise ValueError("tr0ub4dor was refused")
        except ValueError:
            logging.getLogger("fsspec").exception("no")
    assert "dor" not in caplog.text
    assert "5b4a" not in caplog.text
    assert b64encode(b"ada:tr0ub4dor").decode() not in caplog.text
    assert caplog.text.count("***") >= 4


@pytest.mark.slow
def test_a_config_of_python_that_has_an_address_for_a_path_shows_nothing(tmp_path: Path) -> None:
    with pytest.raises(ArrowbankError) as caught:
        scan(ScanConfig(sources=(("t", "s3://AKIAUSERUSER:tr0ub/4dor@bucket/x.jsonl"),)), tmp_path / "out")
    assert_hidden("".join(traceback.format_exception(caught.value)).partition("scan(Scan")[2].partition("\n")[2], "tr0ub/4dor")


# files


def test_nothing_is_stored_that_holds_a_secret(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests import target_banks

    target_banks.make_dump(tmp_path / "dump", lengths=(5, 3))
    place = "s3://AKIAUSERUSER:tr0ub4dor@bucket/model"
    argv = [
        "targets",
        "import",
        str(tmp_path / "dump"),
        "--target-model",
        place,
        "--layers",
        "1,11,21",
        "--out",
        str(tmp_path / "out"),
    ]
    assert main(argv) == 2
    assert "Give that name or path without it" in capsys.readouterr().err
    for path in (tmp_path / "out").rglob("*"):
        assert path.is_dir() or b"tr0ub4dor" not in path.read_bytes()


@pytest.mark.slow
def test_a_bank_pushed_and_pulled_holds_no_secret(
    served: Served, bank: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ARROWBANK_CACHE", str(tmp_path / "cache"))
    place = f"http://ada:{quote(served.password, safe='')}@{served.host}/texts?token={served.token}"
    opened = open_bank(place)
    assert len(opened) == 12
    pull(place, tmp_path / "out")
    for path in (*(tmp_path / "cache").rglob("*"), *(tmp_path / "out").rglob("*")):
        assert served.password not in str(path)
        assert served.token not in str(path)
        assert path.is_dir() or not {served.password.encode(), served.token.encode()} & {path.read_bytes()}
        assert path.is_dir() or served.token.encode() not in path.read_bytes()


# real servers


class Served:
    """A folder behind plain HTTP: with a user and password, or a token, as the request must have them."""

    def __init__(self, folder: Path, *, sizes: bool = True) -> None:
        self.password, self.token = "tw0 w0rds/4nd@sl4shes", "tok-0123456789"
        self.asked: list[str] = []
        served = self

        class Handler(http.server.SimpleHTTPRequestHandler):
            def __init__(self, *args: object) -> None:
                super().__init__(*args, directory=str(folder))  # type: ignore[arg-type]

            def send_head(self):  # type: ignore[no-untyped-def]
                served.asked.append(self.path)
                login = "Basic " + b64encode(f"ada:{served.password}".encode()).decode()
                if parse_qs(urlsplit(self.path).query).get("token") != [served.token] or self.headers["Authorization"] != login:
                    self.send_error(403)
                    return None
                return super().send_head()

            def send_header(self, name: str, value: str) -> None:
                if sizes or name != "Content-Length":
                    super().send_header(name, value)

            def list_directory(self, path: object) -> None:
                self.send_error(404)

            def log_message(self, *args: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.host = f"127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture(params=[True, False], ids=["sizes", "no sizes"])
def served(request: pytest.FixtureRequest, bank: Path) -> Iterator[Served]:
    served = Served(bank.parent, sizes=request.param)
    yield served
    served.close()


@pytest.mark.slow
def test_a_bank_behind_plain_http_is_pulled_with_user_password_and_token(
    served: Served, bank: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = f"http://ada:{quote(served.password, safe='')}@{served.host}/texts?token={served.token}"
    assert main(["pull", place, str(tmp_path / "out")]) == 0
    assert tree_bytes(tmp_path / "out") == tree_bytes(bank)
    said = capsys.readouterr()
    assert f"as http://{served.host}/texts?*** has them" in said.out
    assert_hidden(said.out + said.err, served.password)
    assert served.token not in said.out + said.err
    assert main(["push", str(bank), place]) == 2
    assert "a web address can be read only" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["password", "token", "folder", "port"])
def test_a_web_server_that_refuses_is_a_remote_error(served: Served, tmp_path: Path, wrong: str) -> None:
    parts = {"password": quote(served.password, safe=""), "token": served.token, "folder": "texts", "port": served.host}
    parts |= {wrong: {"port": "127.0.0.1:1"}.get(wrong, "an0therOne")}
    place = f"http://ada:{parts['password']}@{parts['port']}/{parts['folder']}?token={parts['token']}"
    with pytest.raises(InputError if wrong == "folder" else RemoteError) as caught:
        pull(place, tmp_path / "out")
    said = "".join(traceback.format_exception(caught.value))
    assert ("no bank there" in said) == (wrong == "folder")
    assert parts["token"] not in said
    assert_hidden(said, unquote(parts["password"]))


@pytest.mark.slow
@pytest.mark.parametrize("password", ["tr0ub4dor", "w1th/sl4sh+and=m0re", "tw0 w0rds"])
@pytest.mark.parametrize("encoded", [False, True])
def test_user_and_password_of_an_s3_address_are_its_credentials(
    s3: str,
    bank: Path,
    tmp_path: Path,
    password: str,
    encoded: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server answers with the access key that signed each request."""
    place = f"s3://AKIAUSERUSER:{quote(password, safe='') if encoded else password}@banks/texts"
    monkeypatch.setenv("ARROWBANK_CACHE", str(tmp_path / "cache"))
    assert main(["push", str(bank), place]) == 0
    assert main(["pull", place, str(tmp_path / "out")]) == 0
    assert tree_bytes(tmp_path / "out").keys() >= {"manifest.json", "state.json", "data-00000.arrow"}
    assert len(open_bank(place)) == 12
    assert push(bank, place)["url"] == "s3://banks/texts"
    for failing in ("nosuchbucket/texts", "banks/nothing"):
        assert main(["pull", place.replace("banks/texts", failing), str(tmp_path / "other")]) == 2
    said = capsys.readouterr()
    assert_hidden(said.out + said.err, password)
    assert "AKIAUSERUSER" not in said.out + said.err
    from s3fs import S3FileSystem

    used = {fs.key for fs in S3FileSystem._cache.values()}
    assert used == {"AKIAUSERUSER"}
    card = (tmp_path / "out" / "README.md").read_text()
    assert 'open_bank("s3://banks/texts")' in card
    assert_hidden(card, password)


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """An S3 server of this test's own with the bucket `banks`, and no credentials in the environment."""
    with s3_server.serving(monkeypatch, tmp_path) as address:
        yield address
