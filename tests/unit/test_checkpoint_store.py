"""The checkpoint service's storage: whole versions or none, numbers and terms that never repeat."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from offbeat.errors import ConfigError, IntegrityError
from offbeat.v1 import checkpoint_pb2 as checkpoint
from offbeat.weights.manifest import describe, seal
from services.checkpoint import store as storage
from services.checkpoint.store import StoredVersion, UnknownVersion, VersionStore

PAGE = 4096
DATA = bytes(range(1, 251)) * 40
"""10 000 bytes, none of them zero."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[VersionStore]:
    with opened(tmp_path) as store:
        yield store


class opened:
    """A store that is closed at the end of the block."""

    def __init__(self, folder: Path, run_id: str = "run", keep: int = 2) -> None:
        self.store = VersionStore(folder, run_id, keep)

    def __enter__(self) -> VersionStore:
        self.store.open()
        return self.store

    def __exit__(self, *_: object) -> None:
        self.store.close()


def publish(store: VersionStore, step: int = 1, term: int = 1) -> StoredVersion:
    manifest = describe(
        [("a", "uint8", (5000,), DATA[:5000]), ("b", "uint8", (5000,), DATA[5000:])]
    )
    manifest.run_id, manifest.term, manifest.step = store.run_id, term, step
    manifest.version = store.last_number + 1
    seal(manifest)
    folder = store.begin_publish()
    (folder / storage.WEIGHTS).write_bytes(DATA)
    entry = store.commit(folder, manifest)
    store.prune()
    return entry


def numbers(store: VersionStore) -> dict[int, bool]:
    return {entry.version: entry.available for entry in store.versions()}


def test_versions_survive_a_restart(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        assert store.latest() is None
        first = publish(store).manifest
    with opened(tmp_path) as store:
        assert store.manifest(0) == store.manifest(1) == first
        assert store.find(1, 1, first.weights_digest) is store.latest()
        assert store.find(2, 1, first.weights_digest) is None
        assert publish(store).version == 2


def test_the_newest_and_the_leased_keep_their_bytes(store: VersionStore) -> None:
    leased = publish(store)
    leased.leases = 1
    for step in range(2, 5):
        publish(store, step)
    assert numbers(store) == {1: True, 2: False, 3: True, 4: True}
    assert leased.weights.read_bytes() == DATA
    leased.leases = 0
    store.prune()
    assert numbers(store) == {1: False, 2: False, 3: True, 4: True}
    assert not leased.weights.exists()


def test_manifests_outlive_their_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "KEEP_MANIFESTS", 2)
    with opened(tmp_path, keep=1) as store:
        sealed = [publish(store, step).manifest for step in range(5)]
        assert numbers(store) == {3: False, 4: False, 5: True}
    with opened(tmp_path, keep=1) as store:
        assert numbers(store) == {3: False, 4: False, 5: True}
        assert store.manifest(3) == sealed[2]
        with pytest.raises(UnknownVersion, match="the bytes of version 3 are gone"):
            store.get_available(3)
        with pytest.raises(UnknownVersion, match="no version 2"):
            store.get(2)


def _change(change: Callable[[bytearray], object]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        data = bytearray(path.read_bytes())
        change(data)
        path.write_bytes(data)

    return apply


DAMAGES = {
    "first bit": _change(lambda d: d.__setitem__(0, d[0] ^ 1)),
    "middle bit": _change(lambda d: d.__setitem__(len(d) // 2, d[len(d) // 2] ^ 0x10)),
    "last bit": _change(lambda d: d.__setitem__(-1, d[-1] ^ 0x80)),
    "page of zeros": _change(lambda d: d.__setitem__(slice(0, PAGE), bytes(min(PAGE, len(d))))),
    "one byte short": _change(lambda d: d.pop()),
    "half": _change(lambda d: d.__delitem__(slice(len(d) // 2, None))),
    "empty": _change(lambda d: d.clear()),
    "one byte more": _change(lambda d: d.append(7)),
    "gone": Path.unlink,
}


@pytest.mark.parametrize("file", [storage.WEIGHTS, storage.MANIFEST])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found_at_start(tmp_path: Path, file: str, damage: str) -> None:
    with opened(tmp_path) as store:
        publish(store, 1)
        publish(store, 2)
    DAMAGES[damage](tmp_path / "2" / file)
    with opened(tmp_path) as store:
        newest = store.latest()
        assert newest is not None
        assert newest.version == 1
        assert numbers(store) == ({1: True, 2: False} if file == storage.WEIGHTS else {1: True})
        assert publish(store, 2).version == 3


@pytest.mark.parametrize("damage", [name for name in DAMAGES if name != "gone"])
def test_damaged_counters_never_bring_a_term_back(tmp_path: Path, damage: str) -> None:
    with opened(tmp_path) as store:
        publish(store)
        for _ in range(7):
            store.acquire_term(0, 0)
    DAMAGES[damage](tmp_path / storage.COUNTERS)
    with opened(tmp_path) as store:
        assert store.acquire_term(0, 0) > 7
        assert publish(store).version == 2


def test_damage_is_found_when_looked_for(store: VersionStore) -> None:
    entry = publish(store)
    store.verify(entry)
    DAMAGES["middle bit"](entry.weights)
    with pytest.raises(IntegrityError, match="version 1 is damaged: tensor b does not match"):
        store.verify(entry)
    assert numbers(store) == {1: False}


def test_a_publish_whose_bytes_are_gone_is_no_earlier_publish(store: VersionStore) -> None:
    entry = publish(store)
    store.drop_bytes(entry)
    assert store.find(1, 1, entry.manifest.weights_digest) is None


def test_leftovers_of_broken_publishes_go(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        publish(store)
        (store.begin_publish() / storage.WEIGHTS).write_bytes(DATA)
        broken = tmp_path / "2"
        broken.mkdir()
        (broken / storage.WEIGHTS).write_bytes(DATA)
        (broken / f"{storage.MANIFEST}.partial").write_bytes(b"half")
    with opened(tmp_path) as store:
        assert numbers(store) == {1: True}
        assert not broken.exists()
        assert not list((tmp_path / "incoming").iterdir())


def test_a_failed_commit_leaves_nothing_and_burns_its_number(
    store: VersionStore, tmp_path: Path
) -> None:
    (tmp_path / "1").write_text("in the way")
    with pytest.raises(OSError, match="Not a directory"):
        publish(store)
    (tmp_path / "1").unlink()
    assert numbers(store) == {}
    assert publish(store).version == 2


def test_terms_and_numbers_only_rise(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        assert store.acquire_term(0, 0) == 1
        assert store.acquire_term(0, 0) == 2
        assert store.acquire_term(10, 20) == 11
        assert store.acquire_term(5, 5) == 12
        store.raise_term(3)
        store.raise_term(15)
    with opened(tmp_path) as store:
        assert store.term == 15
        assert store.acquire_term(0, 0) == 16
        assert publish(store, term=16).version == 21


def test_a_number_is_never_given_twice(store: VersionStore) -> None:
    manifest = checkpoint.Manifest(version=1)
    publish(store)
    with pytest.raises(ValueError, match="version 1 was already given"):
        store.commit(store.begin_publish(), manifest)


def test_a_folder_has_one_owner(tmp_path: Path) -> None:
    with opened(tmp_path), pytest.raises(ConfigError, match="in use by another"):
        VersionStore(tmp_path, "run", 1).open()
    with opened(tmp_path):
        pass


def test_a_folder_belongs_to_one_run(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        publish(store)
    with pytest.raises(ConfigError, match="holds versions of run run, not of other"):
        VersionStore(tmp_path, "other", 1).open()
