"""Checkpoints are whole or absent, and damage is found before anything is loaded."""

import pytest

from offbeat.checkpoints import Checkpoints, Meta
from offbeat.errors import CheckpointError, ConfigError, Fenced
from offbeat.resume import check_settings, fixed_settings


def save(checkpoints: Checkpoints, term: int, step: int, **extra):
    partial = checkpoints.begin(term, step)
    (partial / "state.safetensors").write_bytes(bytes([step]) * 100)
    return checkpoints.commit(partial, Meta(step, step, term, {1: (0, 0)}, [(term, 0)], **extra))


def test_round_trip(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    saved = save(checkpoints, 1, 3, counts={"trained": 12})
    found = checkpoints.latest()
    assert found == saved
    meta = found.meta()
    assert (meta.step, meta.lineage, meta.history, meta.counts) == (
        3,
        {1: (0, 0)},
        [(1, 0)],
        {"trained": 12},
    )


def test_the_highest_term_and_step_wins_and_old_ones_go(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for term, step in ((1, 5), (1, 10), (2, 7)):
        save(checkpoints, term, step)
    assert [(c.term, c.step) for c in checkpoints.committed()] == [(1, 10), (2, 7)]
    assert checkpoints.latest().step == 7


def test_a_half_written_one_does_not_exist(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    save(checkpoints, 1, 1)
    partial = checkpoints.begin(1, 2)
    (partial / "state.safetensors").write_bytes(b"half")
    unmarked = save(checkpoints, 1, 3)
    (unmarked.path / "COMMITTED").unlink()
    assert checkpoints.latest().step == 1
    checkpoints.begin(1, 4)
    assert not partial.exists()


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_damage_is_found_and_an_older_one_is_taken(tmp_path, caplog, damage):
    checkpoints = Checkpoints(tmp_path, keep=2)
    save(checkpoints, 1, 1)
    file = save(checkpoints, 1, 2).path / "state.safetensors"
    data = bytearray(file.read_bytes())
    data[50] ^= 1
    match damage:
        case "flip":
            file.write_bytes(data)
        case "truncate":
            file.write_bytes(data[:-1])
        case "remove":
            file.unlink()
    assert checkpoints.latest().step == 1
    assert "state.safetensors is damaged" in caplog.text
    with pytest.raises(CheckpointError, match="damaged"):
        checkpoints.find("2")


def test_asking_for_one_that_is_not_there_lists_those_that_are(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    save(checkpoints, 1, 4)
    assert checkpoints.find("4").step == 4
    with pytest.raises(CheckpointError, match="there are: 000001-00000004"):
        checkpoints.find("5")


def test_changed_settings_are_named(tmp_path, recipe):
    saved = save(Checkpoints(tmp_path, keep=2), 1, 3, settings=fixed_settings(recipe))
    check_settings(saved, recipe)
    schedule = recipe.schedule.model_copy(update={"prompts_per_step": 5, "max_lag": 3})
    with pytest.raises(ConfigError, match=r"schedule\.prompts_per_step was 4, is 5") as caught:
        check_settings(saved, recipe.model_copy(update={"schedule": schedule}))
    assert "max_lag" not in str(caught.value)
    fewer = recipe.model_copy(update={"schedule": recipe.schedule.model_copy(update={"steps": 2})})
    with pytest.raises(ConfigError, match=r"raise schedule\.steps"):
        check_settings(saved, fewer)


def test_going_back_puts_newer_ones_aside(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=5)
    for term, step in ((1, 5), (1, 10), (2, 12)):
        save(checkpoints, term, step)
    assert checkpoints.go_back_to("5").step == 5
    assert [(c.term, c.step) for c in checkpoints.committed()] == [(1, 5)]
    assert sorted(path.name for path in (tmp_path / "checkpoints" / "superseded").iterdir()) == [
        "000001-00000010",
        "000002-00000012",
    ]
    save(checkpoints, 3, 8)
    assert checkpoints.latest().step == 8


def test_damage_to_all_of_them_is_never_a_new_beginning(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    (save(checkpoints, 1, 1).path / "COMMITTED").write_bytes(b"\xff\x00")
    with pytest.raises(CheckpointError, match="all checkpoints"):
        checkpoints.latest()


def test_an_overtaken_learner_leaves_the_newer_ones_work_alone(tmp_path):
    newer = Checkpoints(tmp_path, keep=2).begin(term=2, step=5)
    (newer / "state").write_text("half written")
    Checkpoints(tmp_path, keep=2).begin(term=1, step=6)
    assert (newer / "state").exists()
    Checkpoints(tmp_path, keep=2).begin(term=3, step=5)
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {
        ".partial-000003-00000005"
    }


@pytest.mark.parametrize("asked", [1, 2], ids=["before the rename", "before it counts"])
def test_a_learner_that_was_overtaken_leaves_no_checkpoint(tmp_path, asked):
    """It asks before each change that others see, and may be frozen for any time in between."""
    checkpoints = Checkpoints(tmp_path, keep=2)
    save(checkpoints, 1, 1)
    before = sorted(tmp_path.rglob("*"))
    answers = iter([None] * (asked - 1) + [Fenced("term 2 began")])

    def fence():
        answer = next(answers)
        if answer is not None:
            raise answer

    partial = checkpoints.begin(1, 2)
    with pytest.raises(Fenced):
        checkpoints.commit(partial, Meta(2, 2, 1, {1: (0, 0)}, [(1, 0)]), fence=fence)
    assert sorted(tmp_path.rglob("*")) == before
