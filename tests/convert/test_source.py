"""Folders and the Hub as sources: exact bytes, and one clear sentence for everything that can go wrong."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest
from huggingface_hub import constants

from tests.hub_server import Fault, HubServer
from tutel_pack.convert import source as source_module
from tutel_pack.convert.source import FolderSource, HubSource, is_inside, open_source
from tutel_pack.errors import InputError, ResourceError

REPO, OLD, NEW = "org/model", "a" * 40, "b" * 40
SHARD = "model.safetensors"
BYTES = {OLD: Random(1).randbytes(300_000), NEW: Random(2).randbytes(300_000)}
CONTENT = "http://localhost"  # the second host of HubServer


@pytest.fixture
def folders(tmp_path):
    for commit, data in BYTES.items():
        (tmp_path / commit / "sub").mkdir(parents=True)
        (tmp_path / commit / SHARD).write_bytes(data)
        (tmp_path / commit / "config.json").write_text(f'{{"commit": "{commit[0]}", "limit": Infinity}}')
        (tmp_path / commit / "sub" / "a name.txt").write_text("ä")
    return {commit: tmp_path / commit for commit in BYTES}


@pytest.fixture
def hub(folders, monkeypatch):
    with HubServer({REPO: folders}) as server:
        server.tokens = {"hf_reader": {REPO}, "hf_stranger": set()}
        server.use(monkeypatch, token="hf_reader")
        yield server


@pytest.fixture
def waits(monkeypatch):
    """What the source would have slept."""
    slept = []
    monkeypatch.setattr(source_module, "pause", lambda closed, seconds: slept.append(seconds))
    return slept


def refused(kind, *parts):
    """pytest.raises for one sentence that has all the parts, and the kind's exit code."""

    def check(error):
        text = str(error)
        return error.exit_code == {InputError: 2, ResourceError: 3}[kind] and "\n" not in text and all(
            part in text for part in parts)

    return pytest.raises(kind, check=check)


# The Hub: what is read


def test_a_range_is_all_that_is_transferred(hub):
    source = open_source(REPO)
    assert (source.name, source.commit) == (REPO, NEW)
    hub.log.clear()
    assert source.read(SHARD, 1000, 1999) == BYTES[NEW][1000:1999]
    assert [request.status for request in hub.log] == [302, 206]
    assert sum(request.sent for request in hub.log) == 999


def test_hub_and_folder_are_equal(hub, folders):
    remote, local = open_source(REPO), open_source(str(folders[NEW]))
    assert remote.files == local.files and len(local.files) == 3
    for file, size in local.files.items():
        assert remote.read(file, 0, size) == local.read(file, 0, size)
        assert remote.read(file, size - 1, size) == local.read(file, size - 1, size)
    assert remote.read_json("config.json") == local.read_json("config.json") == {"commit": "b", "limit": float("inf")}
    assert remote.read_text("sub/a name.txt") == "ä"


def test_the_token_stays_on_the_hub(hub, waits):
    open_source(REPO).read(SHARD, 0, 10)
    elsewhere = {"Location": f"{hub.content_endpoint}/elsewhere"}
    hub.faults.append(Fault("/api/models", times=99, status=307, headers=elsewhere))
    with refused(ResourceError, "localhost", "answered 403"):
        open_source(REPO)
    seen = {(request.url.startswith(hub.endpoint), request.headers.get("authorization")) for request in hub.log}
    assert seen == {(True, "Bearer hf_reader"), (False, None)}
    assert hub.requests(f"{CONTENT}.*/elsewhere")


def test_one_commit_though_the_branch_moves(hub):
    hub.refs[REPO]["main"] = OLD
    source = open_source(REPO)
    hub.refs[REPO]["main"] = NEW
    assert source.commit == OLD
    assert source.read(SHARD, 0, 100) == BYTES[OLD][:100] and source.read_json("config.json")["commit"] == "a"
    assert open_source(REPO).read(SHARD, 0, 100) == BYTES[NEW][:100], "control: the branch did move"
    assert len(hub.requests("/main")) == 2 and all(OLD in request.url or NEW in request.url
                                                   for request in hub.requests("resolve"))


@pytest.mark.parametrize("revision", [OLD, "v1", "refs/pr/3"])
def test_revisions(hub, revision):
    hub.refs[REPO] |= {"v1": OLD, "refs/pr/3": OLD}
    assert open_source(REPO, revision).commit == OLD


def test_a_renamed_repository_is_followed(hub):
    hub.moved["org/former"] = REPO
    assert open_source("org/former").read(SHARD, 5, 9) == BYTES[NEW][5:9]


def test_a_signed_link_is_used_until_it_runs_out(hub, waits):
    source = open_source(REPO)
    for start in range(3):
        source.read(SHARD, start, start + 10)
    assert len(hub.requests("resolve")) == 1
    hub.expire_links()
    assert source.read(SHARD, 7, 20) == BYTES[NEW][7:20]
    hub.faults.append(Fault(CONTENT, status=410))
    assert source.read(SHARD, 8, 20) == BYTES[NEW][8:20]
    assert len(hub.requests("resolve")) == 3


def test_threads_share_a_source(hub):
    source = open_source(REPO)
    with ThreadPoolExecutor(8) as pool:
        parts = list(pool.map(lambda start: source.read(SHARD, start, start + 3000), range(0, 300_000, 3000)))
    assert b"".join(parts) == BYTES[NEW]


def test_an_empty_range_asks_nothing(hub):
    source = open_source(REPO)
    hub.log.clear()
    assert source.read(SHARD, 300_000, 300_000) == b"" and not hub.log


# The Hub: what goes wrong on the way


def test_a_broken_body_is_resumed(hub, waits):
    source = open_source(REPO)
    hub.faults += [Fault(CONTENT, cut_after=50_000), Fault(CONTENT, cut_after=0), Fault(CONTENT, cut_after=1)]
    hub.log.clear()
    assert source.read(SHARD, 100, 200_100) == BYTES[NEW][100:200_100]
    starts = [request.headers["range"] for request in hub.requests(CONTENT)]
    assert starts == [f"bytes={start}-200099" for start in (100, 50_100, 50_100, 50_101)]
    assert len(waits) == 3


@pytest.mark.parametrize("headers, wait", [
    ({"Retry-After": "7"}, 7), ({"RateLimit": '"resolvers";r=0;t=55'}, 55), ({}, 1),
])  # fmt: skip
def test_rate_limits_are_waited_for(hub, waits, headers, wait):
    hub.faults += [Fault(place, status=429, headers=headers) for place in ("/api/models", "/resolve/", CONTENT)]
    assert open_source(REPO).read(SHARD, 0, 9) == BYTES[NEW][:9]
    assert waits[0] == waits[1] == wait


@pytest.mark.parametrize("place", ["/api/models", "/resolve/", CONTENT])
@pytest.mark.parametrize("fault", [
    {"status": 429}, {"status": 500}, {"status": 503}, {"cut_after": 0},
], ids=str)
def test_attempts_are_bounded(hub, waits, place, fault):
    if place == "/resolve/" and "cut_after" in fault:
        fault = {"status": 504}  # a redirect has no body to cut
    hub.faults.append(Fault(place, times=99, **fault))
    with refused(ResourceError, REPO, "failed", "try again later"):
        open_source(REPO).read(SHARD, 0, 9)
    assert waits == [1, 2, 4, 8, 16]


def test_a_wait_beyond_reason_is_an_error_at_once(hub, waits):
    hub.faults.append(Fault("/api/models", times=99, status=429, headers={"Retry-After": "86400"}))
    with refused(ResourceError, "answered 429"):
        open_source(REPO)
    assert waits == []


def test_whole_files_in_place_of_ranges(hub, waits, monkeypatch):
    source = open_source(REPO)
    hub.faults.append(Fault(CONTENT, times=99, ignore_range=True))
    assert source.read(SHARD, 123_456, 123_999) == BYTES[NEW][123_456:123_999]
    assert source.read(SHARD, 0, 300_000) == BYTES[NEW]
    monkeypatch.setattr(source_module, "MAX_SKIP", 1000)
    assert source.read(SHARD, 1000, 1100) == BYTES[NEW][1000:1100]
    with refused(ResourceError, "ignores byte ranges", SHARD, "hf download"):
        source.read(SHARD, 1001, 1100)
    assert waits == []


def test_a_whole_file_is_not_read_to_its_end(hub, folders):
    os.truncate(folders[NEW] / SHARD, 64 << 20)
    source = open_source(REPO)
    hub.faults.append(Fault(CONTENT, ignore_range=True))
    assert source.read(SHARD, 10, 20) == BYTES[NEW][10:20]
    assert hub.requests(CONTENT)[0].sent < 32 << 20


@pytest.mark.parametrize("fault", [
    pytest.param({"headers": {"Content-Range": "bytes 0-99/300000"}}, id="another place"),
    pytest.param({"headers": {"Content-Range": "bytes 50-199/300000"}}, id="an earlier start"),
    pytest.param({"headers": {"Content-Range": "bytes 100-299999/300000"}, "body": BYTES[NEW][100:]},
                 id="more than asked"),
    pytest.param({"headers": {"Content-Range": "bytes 100-199/299999"}}, id="another file size"),
    pytest.param({"headers": {"Content-Range": "none"}}, id="no range"),
    pytest.param({"headers": {"Content-Encoding": "gzip"}}, id="compressed"),
    pytest.param({"ignore_range": True, "body": BYTES[NEW][:-1]}, id="whole file one byte short"),
    pytest.param({"headers": {"Content-Range": "bytes 100-149/300000"}}, id="two lengths"),
    pytest.param({"ignore_range": True, "body": b"<html>" * 99_999,
                  "headers": {"Content-Length": None, "Connection": "close"}}, id="a page of unknown length"),
    pytest.param({"status": 416}, id="beyond its end"),
])  # fmt: skip
def test_wrong_bytes_are_never_taken(hub, waits, fault):
    source = open_source(REPO)
    hub.faults.append(Fault(CONTENT, **fault))
    assert source.read(SHARD, 100, 200) == BYTES[NEW][100:200], "one bad answer is repaired"
    assert len(waits) == 1
    hub.faults.append(Fault(CONTENT, times=99, **fault))
    with refused(ResourceError, SHARD, REPO):
        source.read(SHARD, 100, 200)


def test_a_server_may_send_less_than_asked(hub, waits):
    source = open_source(REPO)
    hub.faults.append(Fault(CONTENT, headers={"Content-Range": "bytes 100-149/300000"}, body=BYTES[NEW][100:150]))
    assert source.read(SHARD, 100, 200) == BYTES[NEW][100:200]
    assert hub.requests(CONTENT)[-1].headers["range"] == "bytes=150-199"


def test_endless_redirects(hub, waits):
    source = open_source(REPO)
    hub.faults.append(Fault("resolve", times=999, status=302, headers={"Location": "/org/model/resolve/main/x"}))
    with refused(ResourceError, "too many redirects"):
        source.read(SHARD, 0, 1)


# The Hub: what it refuses


@pytest.mark.parametrize("token, setup, repo, revision, parts", [
    (None, "", "org/none", None, ["org/none", "private or does not exist", "HF_TOKEN", "hf auth login"]),
    ("hf_reader", "", "org/none", None, ["org/none", "was not found", "check the name"]),
    (None, "private", REPO, None, ["private or does not exist", "HF_TOKEN"]),
    ("hf_stranger", "private", REPO, None, ["was not found", "what your token may read"]),
    ("hf_expired", "", REPO, None, ["does not accept your token", "expired", "HF_TOKEN"]),
    (None, "gated", REPO, None, ["gated", "accept its terms at {endpoint}/org/model", "hf auth login"]),
    ("hf_stranger", "gated", REPO, None, ["gated", "{endpoint}/org/model", "account of your token"]),
    (None, "403", REPO, None, ["does not let you read org/model", "HF_TOKEN"]),
    ("hf_reader", "403", REPO, None, ["does not let your token read org/model", "read access"]),
    (None, "404", REPO, None, ["was not found", "check the name, or set HF_TOKEN"]),
    (None, "", REPO, "no/such", ["no revision 'no/such'", "{endpoint}/org/model"]),
    ("hf_reader", "", REPO, "no/such", ["no revision 'no/such'", "{endpoint}/org/model"]),
    (None, "disabled", REPO, None, ["disabled access", "another repository"]),
    (None, "418", REPO, None, ["org/model", "418"]),
])  # fmt: skip
def test_refusals_say_what_to_do(hub, monkeypatch, waits, token, setup, repo, revision, parts):
    hub.use(monkeypatch, token)
    if setup in ("private", "gated"):
        getattr(hub, setup).add(REPO)
    elif setup:
        headers = {"X-Error-Message": "Access to this resource is disabled."} if setup == "disabled" else {}
        hub.faults.append(Fault("/api/models", status=403 if setup == "disabled" else int(setup), headers=headers))
    with refused(InputError, *(part.format(endpoint=hub.endpoint) for part in parts)):
        open_source(repo, revision).read(SHARD, 0, 9)
    assert waits == []


@pytest.mark.parametrize("token", [None, "hf_reader"])
def test_a_file_that_vanished(hub, monkeypatch, folders, token):
    hub.use(monkeypatch, token)
    source = open_source(REPO)
    (folders[NEW] / SHARD).unlink()
    with refused(InputError, "no file 'model.safetensors'", REPO, "revision 'main'"):
        source.read(SHARD, 0, 9)


def test_offline_mode(hub, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with refused(ResourceError, REPO, "HF_HUB_OFFLINE"):
        open_source(REPO)
    assert not hub.log


def test_an_unreachable_hub(folders, monkeypatch, waits):
    with HubServer({REPO: folders}) as hub:
        hub.use(monkeypatch)
    with refused(ResourceError, hub.endpoint, "no connection", "try again later"):
        open_source(REPO)


@pytest.mark.parametrize("body", [b"<html>Log in to the hotel</html>", b"[]", b"{}"])
def test_something_else_than_a_hub(hub, body):
    hub.faults.append(Fault("/api/models", body=body))
    with refused(ResourceError, hub.endpoint, "HF_ENDPOINT"):
        open_source(REPO)


def test_a_hub_without_sizes(hub):
    hub.faults.append(Fault("/api/models", body=b'{"id": "org/model", "sha": "%s", "siblings": [{"rfilename": "x"}]}'
                            % NEW.encode()))
    with refused(ResourceError, REPO, "hf download"):
        open_source(REPO)


def test_names_that_would_leave_the_checkpoint_are_not_listed(hub):
    hub.faults.append(Fault("/api/models", body=b'{"id": "org/model", "sha": "%s", "siblings": [{"rfilename": "../x", '
                            b'"size": 1}, {"rfilename": "y", "size": 1}]}' % NEW.encode()))
    assert open_source(REPO).files == {"y": 1}


def test_the_users_environment_is_honoured(hub):
    """HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE and HTTP_PROXY, set as a user sets them: before Python starts."""
    script = ("from tutel_pack.convert.source import open_source\n"
              "print(open_source('org/model').read_json('config.json')['commit'])")

    def run(**variables):
        environment = {**os.environ, "HF_TOKEN": "hf_reader", "PYTHONPATH": os.pathsep.join(sys.path), **variables}
        return subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)

    assert run(HF_ENDPOINT=hub.endpoint).stdout == "b\n"
    assert {request.headers.get("authorization") for request in hub.requests(REPO)} == {"Bearer hf_reader"}
    hub.log.clear()
    assert run(HF_ENDPOINT="http://hub.invalid", HTTP_PROXY=hub.endpoint, http_proxy=hub.endpoint).stdout == "b\n"
    assert hub.requests("http://hub.invalid/api/models/org/model")
    hub.log.clear()
    assert "HF_HUB_OFFLINE is set" in run(HF_ENDPOINT=hub.endpoint, HF_HUB_OFFLINE="1").stderr
    assert not hub.requests(REPO)


# Folders


@pytest.mark.parametrize("model, parts", [
    ("./nowhere", ["no such folder", "./nowhere"]),
    ("../nowhere/x", ["no such folder"]),
    ("/nowhere/x", ["no such folder"]),
    ("~/nowhere-at-all", ["no such folder"]),
    ("nowhere/", ["no such folder"]),
    ("org/name/", ["no such folder"]),
    ("a\\b", ["no such folder"]),
    ("gpt2", ["neither", "org/name"]),
    ("a/b/c", ["neither", "org/name"]),
    ("org/na me", ["neither", "org/name"]),
    ("https://huggingface.co/org/name", ["neither", "org/name"]),
    ("org/a..b", ["neither"]),
    ("", ["neither"]),
    ("x" * 5000, ["neither"]),
    ("a\0b/c", ["neither"]),
])  # fmt: skip
def test_what_is_no_model(model, parts):
    with refused(InputError, *parts):
        open_source(model)


def test_a_folder_comes_before_a_hub_id(folders, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").symlink_to(tmp_path)
    source = open_source(f"org/{OLD}")
    assert isinstance(source, FolderSource) and not isinstance(source, HubSource)
    assert (source.name, source.commit) == (OLD, None)
    with refused(InputError, "is a folder", "'v1'"):
        open_source(f"org/{OLD}", "v1")
    with refused(InputError, "is a file", "give the folder"):
        open_source(f"org/{OLD}/{SHARD}")


def test_a_folder_lists_regular_files_only(folders):
    root = folders[OLD]
    (root / ".git").mkdir()
    (root / ".git" / "model.safetensors").write_bytes(b"x")
    (root / ".gitattributes").write_bytes(b"x")
    (root / "dangling").symlink_to(root / "nothing")
    os.mkfifo(root / "pipe")
    assert list(open_source(str(root)).files) == [".gitattributes", "config.json", SHARD, "sub/a name.txt"]


@pytest.mark.parametrize("file", ["../secret", "sub/../../secret", "{root}/secret", "none"])
def test_paths_outside_are_refused(folders, tmp_path, file):
    (tmp_path / "secret").write_bytes(b"secret")
    with refused(InputError, "has no file"):
        open_source(str(folders[OLD])).read(file.format(root=tmp_path), 0, 6)


def test_links_may_not_leave_the_folder(folders, tmp_path):
    root = folders[OLD]
    (tmp_path / "secret.json").write_text("{}")
    (root / "within.json").symlink_to("config.json")
    (root / "secret.json").symlink_to("../secret.json")
    (root / "absolute.json").symlink_to(tmp_path / "secret.json")
    source = open_source(str(root))
    assert source.read_json("within.json")["commit"] == "a"
    for file in ("secret.json", "absolute.json"):
        with refused(InputError, file, "leaves the folder"):
            source.read_json(file)


@pytest.fixture
def cache(tmp_path):
    """A Hugging Face cache: snapshot -> blobs of the repository -> blobs of the cache (huggingface_hub 2, Xet)."""
    repo = tmp_path / "hub" / "models--org--model"
    snapshot = repo / "snapshots" / NEW
    (snapshot / "sub").mkdir(parents=True)
    (repo / "blobs").mkdir()
    (tmp_path / "hub" / "blobs" / "ab").mkdir(parents=True)
    (tmp_path / "hub" / "blobs" / "ab" / "abcd").write_bytes(b"shared")
    (repo / "blobs" / "1111").write_bytes(b"own")
    (repo / "blobs" / "2222").symlink_to("../../blobs/ab/abcd")
    (snapshot / "own").symlink_to("../../blobs/1111")
    (snapshot / "shared").symlink_to("../../blobs/2222")
    (snapshot / "sub" / "own").symlink_to("../../../blobs/1111")
    return snapshot


def test_links_of_a_hub_cache_pass(cache):
    source = open_source(str(cache))
    assert (source.commit, list(source.files)) == (None, ["own", "shared", "sub/own"])
    assert [source.read_text(file) for file in source.files] == ["own", "shared", "own"]


def test_other_links_of_a_hub_cache_do_not(cache, tmp_path):
    (tmp_path / "secret").write_bytes(b"secret")
    (cache / "secret").symlink_to(tmp_path / "secret")
    (cache.parent.parent / "blobs" / "3333").symlink_to(tmp_path / "secret")
    (cache / "through").symlink_to("../../blobs/3333")
    source = open_source(str(cache))
    for file in ("secret", "through"):
        with refused(InputError, file, "leaves the folder"):
            source.read(file, 0, 6)
    plain = tmp_path / "hub" / "other"
    cache.parent.parent.rename(plain)  # the same links, but no cache's name
    with refused(InputError, "leaves the folder"):
        open_source(str(plain / "snapshots" / NEW)).read("own", 0, 3)


def test_a_file_that_shrinks_while_it_is_read(folders):
    source = open_source(str(folders[OLD]))
    os.truncate(folders[OLD] / SHARD, 1000)
    with refused(InputError, SHARD, "shorter"):
        source.read(SHARD, 900, 1100)
    (folders[OLD] / SHARD).unlink()
    with refused(ResourceError, SHARD, "cannot be read"):
        source.read(SHARD, 0, 10)


@pytest.mark.parametrize("start, stop", [(0, 300_001), (-1, 5), (5, 4), (300_001, 300_001)])
def test_ranges_that_do_not_exist(folders, start, stop):
    with refused(InputError, SHARD, "300000 bytes long"):
        open_source(str(folders[OLD])).read(SHARD, start, stop)


@pytest.mark.parametrize("data, parts", [
    (b'{"a": 1, "b": {"c": 1, "d": 2, "c": 3}}', ["the key 'c' twice"]),
    (b'{"a": 1', ["not valid JSON"]),
    (b"", ["not valid JSON"]),
    (b"[" * 100_000, ["not valid JSON"]),
    (b'{"a": "\xff"}', ["not UTF-8 at byte 7"]),
    ('{"a": 1}'.encode("utf-16"), ["not UTF-8"]),
])  # fmt: skip
def test_broken_json(folders, data, parts):
    (folders[OLD] / "config.json").write_bytes(data)
    with refused(InputError, "'config.json'", "download it again", *parts):
        open_source(str(folders[OLD])).read_json("config.json")


def test_text_is_bounded(folders):
    os.truncate(folders[OLD] / "config.json", source_module.MAX_TEXT + 1)  # a sparse file
    with refused(InputError, "'config.json'", "too big"):
        open_source(str(folders[OLD])).read_json("config.json")


def test_which_paths_are_inside():
    inside = ["a", "a/b.c", ".gitattributes", "...", "a..b/c"]
    outside = ["", "/a", "../a", "a/../b", "a/..", "./a", "a//b", "a/", "a\\b", "..\\a", "C:\\a"]
    assert [path for path in inside + outside if is_inside(path)] == inside


def test_closing_a_source_ends_its_waits(hub, monkeypatch):
    monkeypatch.setattr(source_module, "WAITS", (600,))
    hub.faults = [Fault("resolve", times=9, status=503)]
    source = open_source(REPO)
    with ThreadPoolExecutor(1) as reader:
        waiting = reader.submit(source.read, SHARD, 0, 10)
        source.close()
        with refused(ResourceError, "was stopped"):
            waiting.result(timeout=30)
