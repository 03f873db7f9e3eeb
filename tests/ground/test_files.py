"""Files that are whole or not there, and their folders."""

from pathlib import Path

from refusals import refused

from gbattn.ground import files


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("no folder")
    for path in (tmp_path, tmp_path / "new" / "deep", Path("new"), Path(".")):
        files.check_folder("cache", path)
    for path in (tmp_path / "a.txt", tmp_path / "a.txt" / "sub" / "deep"):
        with refused("cache"):
            files.check_folder("cache", path)


def test_drafts_are_found_by_the_file_they_were_to_become(tmp_path):
    ours = {tmp_path / f"{name}.draft-0123abcd" for name in ("a.json", "b[1].json")}
    for path in (*ours, tmp_path / "a.json.draft-2", tmp_path / "a.json.draft-0123abcd.txt", tmp_path / "a.json"):
        path.write_text("")
    assert {*files.left_drafts(tmp_path)} == ours
    assert files.left_drafts(tmp_path, "b[1].json") == [tmp_path / "b[1].json.draft-0123abcd"]
    assert files.left_drafts(tmp_path, "b1.json") == files.left_drafts(tmp_path / "none") == []


def test_a_folder_is_locked_by_one_at_a_time(tmp_path):
    with files.lock_folder(tmp_path / "new", "folder", "one in use", "a free one"):
        with refused("folder"), files.lock_folder(tmp_path / "new", "folder", "one in use", "a free one"):
            pass
    with files.lock_folder(tmp_path / "new", "folder", "one in use", "a free one"):
        pass


def test_json_that_cannot_be_read_names_its_file(tmp_path):
    path = tmp_path / "a.json"
    for text in (None, "", "{", "[" * 100_000):
        if text is not None:
            path.write_text(text)
        with refused(str(path)):
            files.read_json(path, "JSON")
    files.write_atomic(path, b'{"a": 1}')
    assert files.read_json(path, "JSON") == {"a": 1} and list(tmp_path.iterdir()) == [path]
