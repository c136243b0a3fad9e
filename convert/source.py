"""Where a checkpoint comes from: a folder, or a repository of the Hugging Face Hub that is read by byte ranges.

This module is the only home of huggingface_hub. A Hub source is pinned to one commit when it is opened, and no more of
a file is transferred than what `read` was asked for.
"""

import json
import logging
import os
import re
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import NoReturn
from urllib.parse import urljoin, urlsplit

from huggingface_hub import HfApi, constants, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
from huggingface_hub.errors import HTTPError  # of the client in use: httpx (huggingface_hub 1) or httpx2 (2)
from huggingface_hub.utils import build_hf_headers, get_session, parse_ratelimit_headers, validate_repo_id

from tutel_pack.errors import InputError, ResourceError

log = logging.getLogger(__name__)
MAX_TEXT = 100_000_000  # bytes of a JSON or text file, the limit that safetensors sets for a header
WAITS = (1, 2, 4, 8, 16)  # seconds before each further attempt
MAX_WAIT = 600  # the Hub counts requests over five minutes, so no honest Retry-After is longer
MAX_SKIP = 64 << 20  # bytes thrown away at most when a server ignores the range
MAX_REDIRECTS = 10
LOGIN = "set HF_TOKEN or run `hf auth login`"
CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")


class Source:
    """The files of one checkpoint, of which a subclass gives `_read`. Methods may be called from several threads.

    name    "org/repo", or the folder's name
    commit  the 40-digit hash that a Hub source is pinned to; None for a folder
    files   path relative to the root, with "/" -> size in bytes
    remedy  what a user can do about a file that is broken
    """

    def __init__(self, name: str, commit: str | None, files: dict[str, int]):
        self.name = name
        self.commit = commit
        self.files = files
        self._closed = threading.Event()

    @property
    def remedy(self) -> str:
        return "use another revision" if self.commit else "download it again"

    def read(self, file: str, start: int, stop: int) -> bytearray:
        """Bytes [start, stop) of `file`. Raises InputError if there is no such file or range, ResourceError if it
        cannot be fetched."""
        if file not in self.files:
            raise InputError(f"{self.name} has no file {file!r}")
        if not 0 <= start <= stop <= self.files[file]:
            raise InputError(f"bytes {start} to {stop} of {file!r} in {self.name} do not exist: "
                             f"it is {self.files[file]} bytes long")
        return self._read(file, start, stop) if start < stop else bytearray()

    def read_text(self, file: str) -> str:
        """The whole of a UTF-8 file of at most 100 MB, or InputError."""
        size = self.files.get(file, 0)
        if size > MAX_TEXT:
            raise InputError(f"{file!r} in {self.name} is too big for a text file: {size} bytes")
        try:
            return self.read(file, 0, size).decode("utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"{file!r} in {self.name} is not UTF-8 at byte {error.start}: {self.remedy}") from None

    def read_json(self, file: str):
        """The value of a JSON file, or InputError; a key that stands twice in an object is an error."""
        try:
            return parse_json(self.read_text(file))
        except ValueError as error:
            raise InputError(f"{file!r} in {self.name} {error}: {self.remedy}") from None

    def close(self) -> None:
        """Ends the use of the source: reads that wait for another attempt fail now. No handle is held between two reads;
        the HTTP session is huggingface_hub's."""
        self._closed.set()


def open_source(model: str, revision: str | None = None) -> Source:
    """Opens an existing folder, or else the Hub repository "org/name" at `revision` (default: main).

    Raises InputError if `model` is neither or the Hub refuses it, ResourceError if the Hub cannot be reached.
    """
    path = os.path.expanduser(model)
    if os.path.isdir(path):
        if revision:
            raise InputError(f"{model!r} is a folder and has no revision {revision!r}: leave the revision out")
        return FolderSource(path)
    if os.path.exists(path):
        raise InputError(f"{model!r} is a file: give the folder that holds the checkpoint")
    if model.startswith(("/", ".", "~")) or model.endswith("/") or "\\" in model:
        raise InputError(f"no such folder: {model!r}")
    try:
        validate_repo_id(model)
    except HFValidationError:
        pass
    else:
        if model.count("/") == 1:
            try:
                return HubSource(model, revision or constants.DEFAULT_REVISION)
            except (InputError, ResourceError) as error:
                raise type(error)(f"{error} (and there is no folder {model!r} here)") from error
    raise InputError(f"{model!r} is neither an existing folder nor a Hub id of the form org/name")


def pause(closed: threading.Event, seconds: float) -> bool:
    """Waits, and says whether the source was closed meanwhile."""
    return closed.wait(seconds)


def is_inside(path: str) -> bool:
    """Whether a path from a checkpoint is relative, written plainly with "/", and cannot leave its root."""
    return "\\" not in path and not {"", ".", ".."} & set(path.split("/"))


def parse_json(text: str):
    """json.loads, with a ValueError that completes the sentence "FILE …", also for a key that stands twice."""

    def unique(pairs):
        found = dict(pairs)
        if len(found) < len(pairs):
            twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise ValueError(f"has the key {twice!r} twice in one object")
        return found

    try:
        return json.loads(text, object_pairs_hook=unique)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"is not valid JSON ({error})") from None


class FolderSource(Source):
    """A local folder. Links may not leave it, but for those of a Hugging Face cache snapshot to the cache's blobs."""

    def __init__(self, folder: str):
        self._root = Path(folder).resolve()
        self._homes = [self._root]
        repo = self._root.parent.parent
        if self._root.parent.name == "snapshots" and repo.name.startswith("models--"):
            # huggingface_hub 2 keeps Xet files in the blobs that all repositories of a cache share.
            self._homes += [repo / "blobs", repo.parent / "blobs"]
        if not os.access(folder, os.R_OK | os.X_OK):
            raise InputError(f"the folder {folder!r} may not be read: change its permissions")
        super().__init__(os.path.basename(os.path.abspath(folder)), None, dict(sorted(self._list())))

    def _list(self):
        for parent, folders, names in os.walk(self._root):
            folders[:] = [folder for folder in folders if not folder.startswith(".")]  # .git, .cache of a download
            for path in (Path(parent, name) for name in names):
                if os.path.isfile(path):  # False too for a link that may not be followed
                    yield path.relative_to(self._root).as_posix(), path.stat().st_size

    def _read(self, file, start, stop):
        path = (self._root / file).resolve()
        if not any(path.is_relative_to(home) for home in self._homes):
            raise InputError(f"{file!r} in {self.name} is a link that leaves the folder: put the file itself there")
        data = bytearray(stop - start)
        rest = memoryview(data)
        try:
            with open(path, "rb", buffering=0) as stream:
                stream.seek(start)
                while rest and (count := stream.readinto(rest)):
                    rest = rest[count:]
        except OSError as error:
            raise ResourceError(f"{file!r} in {self.name} cannot be read: {error.strerror}") from None
        if rest:
            raise InputError(f"{file!r} in {self.name} became shorter while it was read")
        return data


class _Again(Exception):
    """An attempt failed in a way that may pass: the reason, and the seconds that the server asks to wait."""

    def __init__(self, reason: str, wait: float = 0):
        super().__init__(reason)
        self.wait = wait


class HubSource(Source):
    """One commit of a Hub repository. HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE and proxies are huggingface_hub's."""

    def __init__(self, repo: str, revision: str):
        super().__init__(repo, None, {})
        self._revision = revision
        self._api = HfApi(library_name="tutel-pack")
        self._links: dict[str, str] = {}  # file -> signed URL on the content network, until that refuses it
        info = self._retry(f"looking up {repo} at {self._api.endpoint}", self._look_up)
        sizes = {entry.rfilename: entry.size for entry in info.siblings or [] if is_inside(entry.rfilename)}
        if not re.fullmatch("[0-9a-f]{40}", info.sha or "") or None in sizes.values():
            raise ResourceError(f"{self._api.endpoint} tells no commit or no file sizes for {repo}: "
                                "download it with `hf download` and give the folder")
        self.commit, self.files = info.sha, sizes

    def _look_up(self):
        try:
            return self._api.model_info(self.name, revision=self._revision, files_metadata=True,
                                        timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT)
        except HfHubHTTPError as error:
            self._refuse(error.response)
        except (ValueError, TypeError, KeyError):
            raise ResourceError(f"{self._api.endpoint} does not answer as a Hub does: check HF_ENDPOINT") from None

    def _read(self, file, start, stop):
        data = bytearray(stop - start)
        done = 0

        def attempt():
            nonlocal done  # a further attempt goes on where the last one broke
            if done == len(data):
                return
            with closing(self._request(file, start + done, stop)) as response:
                skip = self._check(response, file, start + done, stop)
                for chunk in response.iter_raw():
                    room, part = len(data) - done, chunk[skip:]
                    skip = max(0, skip - len(chunk))
                    data[done : done + len(part)] = part[:room]
                    done += len(part[:room])
                    # A whole file goes on; a range is read to its end, so that its connection can be used again.
                    if len(part) > room:
                        break
            if done < len(data):
                raise _Again("the answer ended early")

        self._retry(f"reading {file} of {self.name}", attempt)
        return data

    def _retry(self, what: str, attempt: Callable):
        for wait in (*WAITS, None):
            try:
                return attempt()
            except OfflineModeIsEnabled:
                remedy = "unset it or give a downloaded folder"
                raise ResourceError(f"{what} failed: HF_HUB_OFFLINE is set, {remedy}") from None
            except _Again as again:
                failure = again
            except HTTPError as error:
                failure = _Again(f"there is no connection ({str(error) or type(error).__name__})")
            if wait is None or failure.wait > MAX_WAIT:
                break
            wait = max(wait, failure.wait)
            log.warning("%s: %s; the next attempt is in %.0f s", what, failure, wait)
            if pause(self._closed, wait):
                raise ResourceError(f"{what} was stopped")
        raise ResourceError(f"{what} failed: {failure}; try again later")

    def _request(self, file: str, start: int, stop: int):
        """The open response for a range. Redirects are followed here, so that no other host ever gets the token."""
        url = self._links.get(file) or hf_hub_url(self.name, file, revision=self.commit, endpoint=self._api.endpoint)
        for _ in range(MAX_REDIRECTS):
            headers = build_hf_headers(token=None if self._on_hub(url) else False, library_name="tutel-pack")
            # Compressed answers would make ranges count compressed bytes; some content networks then ignore them.
            headers |= {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
            session = get_session()
            request = session.build_request("GET", url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT)
            response = session.send(request, stream=True, follow_redirects=False)
            if not response.has_redirect_location:
                if not self._on_hub(url):
                    self._links[file] = url
                return response
            response.close()
            url = urljoin(url, response.headers["location"])
        raise _Again("too many redirects")

    def _on_hub(self, url: str) -> bool:
        return urlsplit(url)[:2] == urlsplit(self._api.endpoint)[:2]

    def _check(self, response, file: str, start: int, stop: int) -> int:
        """How many bytes of the body come before `start`, once it is certain that the body is of the right file."""
        size, headers, status = self.files[file], response.headers, response.status_code
        if status not in (200, 206):
            self._refuse(response, file)
        if headers.get("content-encoding", "identity") != "identity":
            raise _Again("the server sends compressed ranges")
        found = CONTENT_RANGE.fullmatch(headers.get("content-range", ""))
        if status == 206 and not (
            found and int(found[1]) == start <= int(found[2]) < stop and found[3] in ("*", str(size))
        ):
            wanted = f"{start}-{stop - 1} of {size}"
            raise _Again(f"the server sent Content-Range {headers.get('content-range')!r} for bytes {wanted}")
        # A range says its length twice; of a whole file the length is all there is to know it by.
        length = int(found[2]) + 1 - start if status == 206 else size
        if headers.get("content-length", str(length) if status == 206 else None) != str(length):
            raise _Again(f"the server sent {headers.get('content-length')} bytes in place of {length}")
        if status == 200 and start > MAX_SKIP:
            raise ResourceError(f"the server ignores byte ranges of {file} in {self.name}: "
                                "download it with `hf download` and give the folder")
        return start if status == 200 else 0

    def _refuse(self, response, file: str | None = None) -> NoReturn:
        """Raises what an unwanted status means: _Again if another attempt may help, else InputError."""
        status, url = response.status_code, str(response.request.url)
        if status in (408, 429) or status >= 500:
            raise _Again(f"{urlsplit(url).netloc} answered {status}", _asked_wait(response.headers))
        if not self._on_hub(url):  # a signed URL ran out: the next attempt gets a new one from the Hub
            self._links.pop(file, None)
            raise _Again(f"{urlsplit(url).netloc} answered {status}")
        raise InputError(self._explain(response, file)) from None

    def _explain(self, response, file: str | None) -> str:
        repo, hub, status = self.name, self._api.endpoint, response.status_code
        code = response.headers.get("X-Error-Code")
        with_token = "authorization" in response.request.headers
        if code == "GatedRepo":
            then = "with the account of your token" if with_token else f"and {LOGIN}"
            return f"{repo} is gated: accept its terms at {hub}/{repo} {then}"
        if response.headers.get("X-Error-Message") == "Access to this resource is disabled.":
            return f"{hub} has disabled access to {repo}: use another repository"
        if code == "RevisionNotFound":
            return f"{repo} has no revision {self._revision!r}: see {hub}/{repo}/tree/main for its branches and tags"
        if code == "EntryNotFound":
            return f"{repo} has no file {file!r} at revision {self._revision!r}"
        if status == 401 and with_token:
            return f"{hub} does not accept your token for {repo} (wrong, expired or revoked): {LOGIN} with a valid one"
        if status == 401:
            return f"{repo} is no folder here, and at {hub} it is private or does not exist: check the name, or {LOGIN}"
        if status == 403:
            remedy = "use one with read access to it" if with_token else LOGIN
            return f"{hub} does not let {'your token' if with_token else 'you'} read {repo}: {remedy}"
        if status == 404:
            remedy = "check the name and what your token may read" if with_token else f"check the name, or {LOGIN}"
            return f"{repo} is no folder here and was not found at {hub}: {remedy}"
        return f"{hub} refuses {file or 'to look up ' + repo} with status {status}"


def _asked_wait(headers) -> int:
    """Seconds that a response asks to wait, by the Hub's own RateLimit header or by Retry-After."""
    limit, after = parse_ratelimit_headers(headers), headers.get("retry-after", "").strip()
    if limit and limit.remaining == 0:
        return limit.reset_in_seconds
    return int(after) if after.isdecimal() else 0
