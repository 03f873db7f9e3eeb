"""Text while it is generated."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from gbattn.lab.text_stream import TextStream
from gbattn.lab.token_cache import load_corpus


def tokens_by_one(corpus, *texts):
    """The tokens of texts, one column at a time; a shorter one repeats its last."""
    rows = [corpus.encode(text).tolist() for text in texts]
    longest = max(map(len, rows))
    rows = torch.tensor([row + row[-1:] * (longest - len(row)) for row in rows])
    return rows.split(1, dim=1)


def test_a_text_streams_in_whole_characters(corpus):
    written = []
    text = TextStream(corpus, write=lambda b, new: written.append(new))
    for new in tokens_by_one(corpus, "a smile: 😀!"):
        assert not text(new)
    assert text.finish() == ["a smile: 😀!"] == ["".join(written)]
    assert not any("\ufffd" in new for new in written)
    half = TextStream(corpus)
    half(torch.tensor([corpus.encode("😀").tolist()[:-1]]))
    assert half.finish()[0].endswith("\ufffd")


@settings(max_examples=40, deadline=None)
@given(st.text("ab\n", min_size=1, max_size=12), st.lists(st.text("ab\n", min_size=1, max_size=3), max_size=3))
def test_a_text_ends_before_its_first_stop_string(corpus, said, stop):
    written = []
    text = TextStream(corpus, stop=stop, write=lambda b, new: written.append(new))
    done = [text(new) for new in tokens_by_one(corpus, said)]
    wanted, ended = said, False
    for n in range(len(said) + 1):  # letter by letter; of stop strings that end together, the longest
        ends = [one for one in stop if said[:n].endswith(one)]
        if ends:
            wanted, ended = said[: n - max(map(len, ends))], True
            break
    assert text.finish() == [wanted] and "".join(written) == wanted and done[-1] == ended


def test_texts_of_a_batch_end_each_for_itself_and_all_together(corpus):
    text = TextStream(corpus, stop=["."])
    done = [text(new) for new in tokens_by_one(corpus, "one. two three four", "one two three. four")]
    assert text.finish() == ["one", "one two three"] and done[-1] and not done[0]


def test_a_stream_of_the_published_recipe_has_spaces(folder, cache):
    lossy = load_corpus(folder, tokenizer="published", vocab_size=300, max_train_tokens=50, cache=cache)
    text = TextStream(lossy)
    text(torch.from_numpy(lossy.valid[:3].astype("int64"))[None])
    assert text.finish() == [" the dog sat"]
    with refused("stop"):
        TextStream(lossy, stop="x")
    with refused("stop"):
        TextStream(lossy, stop=[""])
    with refused("new"):
        text(torch.zeros(2, 1).long())
    with refused("write"):
        TextStream(lossy, write=3)
