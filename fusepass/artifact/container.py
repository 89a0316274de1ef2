"""The file of an artifact: a zip with a manifest that names every other entry with its size and hash.

The hash of the manifest is the archive's comment. So a file that is cut short, or of which an entry was changed, is told from a whole
one. That is no signature: who can write a file can write its hashes, and an artifact holds native code, so load none from a stranger.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from fusepass.errors import ArtifactError

FORMAT = 1
MANIFEST = "manifest.json"
_TIME = (1980, 1, 1, 0, 0, 0)  # of every entry: a file does not tell when it was written
_MOST_MANIFEST = 1 << 28  # bytes
_PACKED = (".json", ".so", ".cpp", ".cu")  # weights do not become smaller


def write(path: Path, manifest: Mapping[str, Any], entries: Mapping[str, bytes]) -> None:
    """Write an artifact at `path`, in place of what is there, all at once.

    Raises:
        OSError: it cannot be written.
    """
    handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    fresh = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            _write(file, manifest, entries)
        fresh.chmod(0o666 & ~_umask())
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise


def packed(manifest: Mapping[str, Any], entries: Mapping[str, bytes]) -> bytes:
    """An artifact as bytes."""
    file = io.BytesIO()
    _write(file, manifest, entries)
    return file.getvalue()


def _write(file: IO[bytes], manifest: Mapping[str, Any], entries: Mapping[str, bytes]) -> None:
    listed = {name: [len(content), _hash(content)] for name, content in entries.items()}
    text = json.dumps({"format": FORMAT, "entries": listed, **manifest}, sort_keys=True, allow_nan=False).encode()
    with zipfile.ZipFile(file, "w") as archive:
        archive.comment = _hash(text).encode()
        for entry, content in {MANIFEST: text, **entries}.items():
            info = zipfile.ZipInfo(entry, _TIME)
            info.compress_type = zipfile.ZIP_DEFLATED if entry.endswith(_PACKED) else zipfile.ZIP_STORED
            archive.writestr(info, content)


class Reader:
    """An artifact that is open for reading.

    Attributes:
        manifest: what it says of itself.
    """

    def __init__(self, path: Path | io.BytesIO) -> None:
        """Open the artifact at `path`, or in memory.

        Raises:
            OSError: there is no such file.
            ArtifactError: it is damaged, or of a format that this version of fusepass does not read.
        """
        self._path = path if isinstance(path, Path) else "an artifact"
        try:
            self._archive = zipfile.ZipFile(path)
        except zipfile.BadZipFile as error:
            raise self._damaged(f"it is no artifact, or cut short ({error})") from error
        try:
            self.manifest = self._manifest()
        except BaseException:
            self._archive.close()
            raise

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._archive.close()

    def read(self, name: str) -> bytes:
        """The entry `name`, compared with its size and hash.

        Raises:
            ArtifactError: it is damaged or not there.
        """
        listed = self.manifest["entries"].get(name)
        if listed is None:
            raise self._damaged(f"{name} is missing")
        size, digest = listed
        content = self._content(name, size)
        if len(content) != size or _hash(content) != digest:
            raise self._damaged(f"{name} is not what was written")
        return content

    def check_kind(self, part: str, other: str) -> None:
        """Compare what the file holds with what is to be read.

        Args:
            part: of the manifest, which files of this kind have.
            other: the function that reads those of the other kind.

        Raises:
            ArtifactError: it is of the other kind.
        """
        if part not in self.manifest:
            raise ArtifactError(f"{self._path} holds no {part}: {other} reads such a file")

    def understood(self, action: Callable[[], Any]) -> Any:
        """What `action` makes of the manifest; whatever is not as it should be is damage.

        Raises:
            ArtifactError: something is missing, or of another type.
        """
        try:
            return action()
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, StopIteration) as error:
            raise self._damaged(f"{type(error).__name__}: {error}") from error

    def _manifest(self) -> dict[str, Any]:
        if MANIFEST not in self._archive.namelist():
            raise ArtifactError(
                f"{self._path} is no artifact of fusepass, but another zip file: it holds no {MANIFEST}"
            )
        text = self._content(MANIFEST, _MOST_MANIFEST)
        if _hash(text).encode() != self._archive.comment:
            raise self._damaged(f"{MANIFEST} is not what was written")
        manifest = self.understood(lambda: json.loads(text))
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            found = manifest.get("format") if isinstance(manifest, dict) else None
            raise ArtifactError(
                f"{self._path} has format {found!r}; this version of fusepass reads format {FORMAT}: save it anew"
            )
        names = [MANIFEST, *self.understood(lambda: [*manifest["entries"]])]
        if sorted(self._archive.namelist()) != sorted(names):
            raise self._damaged("it holds other entries than it lists")
        return manifest

    def _content(self, name: str, most: int) -> bytes:
        """The bytes of an entry, or more than `most` of them."""
        try:
            with self._archive.open(name) as file:
                return file.read(most + 1)
        except (zipfile.BadZipFile, zlib.error, KeyError, EOFError, OSError, RuntimeError, ValueError) as error:
            raise self._damaged(str(error)) from error

    def _damaged(self, what: str) -> ArtifactError:
        return ArtifactError(f"{self._path} is damaged: {what}; copy it once more, or save it anew")


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _umask() -> int:
    """The umask, which can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
