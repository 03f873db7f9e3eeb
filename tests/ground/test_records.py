"""Where records lie."""

from refusals import refused

from gbattn.ground import records


def test_results_are_found_from_below_and_missed_with_a_sentence(tmp_path, monkeypatch):
    monkeypatch.delenv("GBATTN_RESULTS", raising=False)
    below = tmp_path / "nbs" / "deep"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    with refused("GBATTN_RESULTS"):
        records.results_folder()
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "reported.json").write_text("[]")
    assert records.results_folder() == tmp_path / "results"
    monkeypatch.setenv("GBATTN_RESULTS", str(tmp_path))
    assert records.results_folder() == tmp_path
