"""The versions of one run on disk. Knows nothing of gRPC; used by the service only.

    DIRECTORY/
      lock                        held by the one process that may write here
      counters.json               newest term and version number, with a checksum
      incoming/<random>/          publishes under way
      <n>/weights.bin             the tensors of version n, one after the other
      <n>/from-<b>.delta          deltas from version b to n: sent to receivers that hold b
      <n>/manifest.pb             written last: a version without it does not exist

A version becomes visible by one rename (of its manifest), so a crash leaves the old state or the
new one. Its number is durable before that, and so never given twice. Counters and manifests are
fsynced; the tensors are not: they are a cache that the learner can upload again, and start-up
finds what a power failure took from them. A version that was uploaded as a delta is committed with
room for its tensors, which are written afterwards; start-up makes them from base and delta when
that was cut short.

All methods block. Those that change something must not run at the same time (the service has a
lock); the others may be called from any thread.
"""

import fcntl
import json
import logging
import os
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.message import DecodeError

from offbeat.errors import ConfigError, IntegrityError
from offbeat.failpoints import failpoint
from offbeat.v1 import checkpoint_pb2 as checkpoint
from offbeat.weights import delta
from offbeat.weights.hashing import hash_of, verify_file
from offbeat.weights.manifest import check_sealed

log = logging.getLogger(__name__)

WEIGHTS = "weights.bin"
MANIFEST = "manifest.pb"
COUNTERS = "counters.json"
DELTAS = "from-*.delta"

KEEP_MANIFESTS = 1000
"""Manifests that are kept of versions whose bytes are gone."""

SKIPPED_TERMS = 1000
"""How far terms jump when the counters are damaged: beyond any that was given and not used."""

COMMIT_POINTS = (
    "publish.received",
    "publish.marked",
    "publish.counted",
    "publish.moved",
    "publish.manifest_written",
    "publish.manifest_renamed",
    "publish.committed",
)
"""Failpoints from the last byte of a publish to its answer, in order."""


class UnknownVersion(LookupError):
    """There is no such version, or its bytes are gone; the text says which."""


@dataclass
class StoredVersion:
    """A version that was committed."""

    manifest: checkpoint.Manifest
    """Without tensors when the bytes are gone; `VersionStore.manifest` returns all of it."""
    folder: Path
    available: bool
    leases: int = 0
    """Fetches under way. Retention spares a version that has any."""

    @property
    def version(self) -> int:
        """Its number."""
        return self.manifest.version

    @property
    def weights(self) -> Path:
        """The file with the bytes."""
        return self.folder / WEIGHTS


def delta_path(folder: Path, base: int) -> Path:
    """The file of the delta from version `base` to the version of the folder."""
    return folder / DELTAS.replace("*", str(base))


class VersionStore:
    """The versions in `directory`. Call `open` first; that reads and checks all of it."""

    def __init__(self, directory: Path, run_id: str, keep_versions: int) -> None:
        self.directory = directory
        self.run_id = run_id
        self.term = 0
        """Newest term."""
        self.last_number = 0
        """Largest version number that was ever given, whether or not its version came to be."""
        self.damaged = 0
        """Versions that were found damaged since the start."""
        self._keep = keep_versions
        self._versions: dict[int, StoredVersion] = {}
        self._lock: int | None = None

    # ---- start and end

    def open(self) -> None:
        """Loads what is there, drops what is broken, and begins to own the folder.

        Raises `ConfigError` when another process owns it or it belongs to another run.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        self._lock = self._take_lock()
        shutil.rmtree(self._incoming, ignore_errors=True)
        self._incoming.mkdir()
        self._load_versions()
        self._load_counters()
        self.prune()

    def close(self) -> None:
        """Gives the folder up."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # ---- reading

    def latest(self) -> StoredVersion | None:
        """The newest version whose bytes are there."""
        available = [entry for entry in self._versions.values() if entry.available]
        return max(available, key=lambda entry: entry.version, default=None)

    def versions(self) -> list[StoredVersion]:
        """All versions, oldest first."""
        return sorted(self._versions.values(), key=lambda entry: entry.version)

    def get(self, version: int) -> StoredVersion:
        """A version, also one whose bytes are gone; 0: the newest available one."""
        entry = self._versions.get(version) if version else self.latest()
        if entry is None:
            raise UnknownVersion(self._absence(version))
        return entry

    def get_available(self, version: int) -> StoredVersion:
        """A version whose bytes are there; 0: the newest."""
        entry = self.get(version)
        if not entry.available:
            raise UnknownVersion(
                f"the bytes of version {version} are gone; fetch the newest one (version 0)"
            )
        return entry

    def manifest(self, version: int) -> checkpoint.Manifest:
        """The whole manifest of a version; 0: the newest available one."""
        entry = self.get(version)
        if entry.available:
            return entry.manifest
        try:
            return _read_manifest(entry.folder)
        except FileNotFoundError:
            raise UnknownVersion(self._absence(version)) from None

    def find(self, term: int, step: int, weights_digest: bytes) -> StoredVersion | None:
        """The available version that this publish has already become, if it has."""
        for entry in self._versions.values():
            found = entry.manifest
            key = (found.term, found.step, found.weights_digest)
            if entry.available and key == (term, step, weights_digest):
                return entry
        return None

    def find_part(self, part: checkpoint.Manifest) -> StoredVersion | None:
        """The same for a part of a publish: the version that has its tensors, published under its publish id."""
        wanted = {spec.name: (spec.offset, spec.hash) for spec in part.tensors}
        for entry in self._versions.values():
            found = entry.manifest
            same = (found.term, found.step, found.publish_id) == (
                part.term,
                part.step,
                part.publish_id,
            )
            if not (entry.available and same and found.total_bytes == part.total_bytes):
                continue
            if wanted.items() <= {s.name: (s.offset, s.hash) for s in found.tensors}.items():
                return entry
        return None

    # ---- terms and numbers

    def acquire_term(self, term_floor: int, version_floor: int) -> int:
        """A term above all earlier ones and the floor; durable when this returns."""
        term = max(self.term, term_floor) + 1
        self._count(term, max(self.last_number, version_floor))
        return term

    def raise_term(self, term: int) -> None:
        """Makes sure that terms below `term` are refused from now on."""
        if term > self.term:
            self._count(term, self.last_number)

    # ---- publishing

    def begin_publish(self) -> Path:
        """An empty folder for the bytes that come in."""
        folder = self._incoming / uuid.uuid4().hex
        folder.mkdir()
        return folder

    def end_publish(self, folder: Path) -> None:
        """Removes what is left of a publish."""
        shutil.rmtree(folder, ignore_errors=True)

    def commit(self, folder: Path, manifest: checkpoint.Manifest) -> StoredVersion:
        """Makes the bytes in `folder` the version that the sealed manifest describes."""
        number = manifest.version
        if number <= self.last_number:
            raise ValueError(f"version {number} was already given; the last was {self.last_number}")
        self._count(self.term, number)
        failpoint("publish.counted")
        return self._move_in(folder, manifest)

    def adopt(self, folder: Path, manifest: checkpoint.Manifest) -> StoredVersion:
        """Takes in a version that another service has numbered, in whatever order. For relays."""
        self._count(max(self.term, manifest.term), max(self.last_number, manifest.version))
        shutil.rmtree(self.directory / str(manifest.version), ignore_errors=True)
        return self._move_in(folder, manifest)

    def _move_in(self, folder: Path, manifest: checkpoint.Manifest) -> StoredVersion:
        number = manifest.version
        target = self.directory / str(number)
        try:
            folder.rename(target)
            failpoint("publish.moved")
            partial = _write_synced(target / f"{MANIFEST}.partial", manifest.SerializeToString())
            failpoint("publish.manifest_written")
            partial.rename(target / MANIFEST)
            failpoint("publish.manifest_renamed")
            _sync_folder(target)
            _sync_folder(self.directory)
        except OSError:
            shutil.rmtree(target, ignore_errors=True)
            raise
        entry = StoredVersion(manifest, target, available=True)
        self._put(entry)
        return entry

    # ---- removing

    def prune(self) -> None:
        """Removes the bytes of versions that are neither new nor leased, and very old manifests."""
        available = [entry for entry in self.versions() if entry.available]
        for entry in available[: -self._keep]:
            if not entry.leases:
                self.drop_bytes(entry)
        gone = [entry for entry in self.versions() if not entry.available]
        for entry in gone[:-KEEP_MANIFESTS]:
            self._versions = {n: e for n, e in self._versions.items() if n != entry.version}
            shutil.rmtree(entry.folder, ignore_errors=True)

    def drop_bytes(self, entry: StoredVersion) -> None:
        """Removes the bytes of a version; its manifest stays."""
        bare = checkpoint.Manifest()
        bare.CopyFrom(entry.manifest)
        bare.ClearField("tensors")
        bare.ClearField("parity")
        # Cleared fields keep their memory as long as their message lives; the message made anew has none of it.
        bare = checkpoint.Manifest.FromString(bare.SerializeToString())
        self._put(StoredVersion(bare, entry.folder, available=False))
        entry.weights.unlink(missing_ok=True)
        for path in entry.folder.glob(DELTAS):
            path.unlink(missing_ok=True)

    def verify(self, entry: StoredVersion) -> None:
        """Raises `IntegrityError`, after dropping the bytes, when they do not match the manifest."""
        try:
            verify_file(entry.weights, entry.manifest)
        except (FileNotFoundError, IntegrityError) as error:
            self.damaged += 1
            self.drop_bytes(entry)
            raise IntegrityError(f"version {entry.version} is damaged: {error}") from error

    # ---- inside

    @property
    def _incoming(self) -> Path:
        return self.directory / "incoming"

    def _absence(self, version: int) -> str:
        if version == 0:
            return f"run {self.run_id} has no version yet; publish one first"
        return f"run {self.run_id} has no version {version}"

    def _put(self, entry: StoredVersion) -> None:
        # A new dict each time: readers in other threads may be going through the old one.
        self._versions = {**self._versions, entry.version: entry}

    def _take_lock(self) -> int:
        descriptor = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise ConfigError(
                f"{self.directory} is in use by another checkpoint service: end it, "
                "or set another checkpoint.directory"
            ) from None
        return descriptor

    def _load_versions(self) -> None:
        folders = [path for path in self.directory.iterdir() if path.name.isdecimal()]
        for folder in sorted(folders, key=lambda path: int(path.name)):  # bases first
            try:
                manifest = _read_manifest(folder)
            except FileNotFoundError:
                log.warning("%s has no manifest: removing what a broken publish left", folder)
                shutil.rmtree(folder)
            except IntegrityError as error:
                self.damaged += 1
                log.error("%s; removing the version", error)
                shutil.rmtree(folder)
            else:
                self._load_bytes(folder, manifest)

    def _load_bytes(self, folder: Path, manifest: checkpoint.Manifest) -> None:
        if manifest.run_id != self.run_id:
            raise ConfigError(
                f"{self.directory} holds versions of run {manifest.run_id}, not of {self.run_id}: "
                "set another checkpoint.directory, or the run.id that they belong to"
            )
        entry = StoredVersion(manifest, folder, available=True)
        self._put(entry)
        if not entry.weights.exists():
            self.drop_bytes(entry)
            return
        try:
            verify_file(entry.weights, manifest)
        except IntegrityError as error:
            if self._rebuild(entry):
                log.warning("version %d was made again from its delta", entry.version)
                return
            self.damaged += 1
            self.drop_bytes(entry)
            log.error("version %d is damaged: %s; dropped its bytes", entry.version, error)

    def _rebuild(self, entry: StoredVersion) -> bool:
        """Makes the bytes from a base and the delta that was uploaded; False when that can't be done."""
        for path in entry.folder.glob(DELTAS):
            base = self._versions.get(int(path.stem.removeprefix("from-")))
            if base is None or not base.available:
                continue
            try:
                weights = bytearray(base.weights.read_bytes())
                delta.apply(path.read_bytes(), memoryview(weights))
                entry.weights.write_bytes(weights)
                verify_file(entry.weights, entry.manifest)
            except (OSError, IntegrityError) as error:
                log.warning("version %d: %s", entry.version, error)
            else:
                return True
        return False

    def _load_counters(self) -> None:
        manifests = [entry.manifest for entry in self._versions.values()]
        term = max((manifest.term for manifest in manifests), default=0)
        number = max((manifest.version for manifest in manifests), default=0)
        try:
            counters = _read_counters(self.directory / COUNTERS)
        except FileNotFoundError:
            counters = {"term": 0, "version": 0}
        except IntegrityError as error:
            log.error("%s; going on from the versions, %d terms higher", error, SKIPPED_TERMS)
            counters = {"term": term + SKIPPED_TERMS, "version": number}
        self.term = max(term, counters["term"])
        self.last_number = max(number, counters["version"])

    def _count(self, term: int, number: int) -> None:
        """Makes both counters durable, then visible."""
        values = json.dumps({"term": term, "version": number})
        text = json.dumps({"values": values, "check": hash_of(values.encode()).hex()})
        path = self.directory / COUNTERS
        _write_synced(path.with_suffix(".partial"), text.encode()).rename(path)
        _sync_folder(self.directory)
        self.term, self.last_number = term, number


def _read_counters(path: Path) -> dict[str, int]:
    data = path.read_bytes()
    try:
        tree = json.loads(data)
        values = tree["values"]
        if hash_of(values.encode()).hex() == tree["check"]:
            counters: dict[str, int] = json.loads(values)
            return counters
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise IntegrityError(f"{path} is damaged")


def _read_manifest(folder: Path) -> checkpoint.Manifest:
    """The manifest in `folder`, verified. Raises `IntegrityError`, `FileNotFoundError`."""
    data = (folder / MANIFEST).read_bytes()
    try:
        manifest = checkpoint.Manifest.FromString(data)
    except DecodeError:
        raise IntegrityError(f"{folder / MANIFEST} is not a manifest") from None
    check_sealed(manifest)
    if str(manifest.version) != folder.name:
        raise IntegrityError(f"{folder} holds the manifest of version {manifest.version}")
    return manifest


def _write_synced(path: Path, data: bytes) -> Path:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        failpoint("publish.fsync")
        os.fsync(file.fileno())
    return path


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
