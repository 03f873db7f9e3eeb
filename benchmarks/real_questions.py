"""Ask SmolLM2 questions before and after it is boosted, with lm-eval: how does a page of documentation go on?

A question is 400 characters of a document of Python's documentation (test split) and four texts of 100 characters from
the same document: what follows, and three other places. Chance is 25 %. Asked are the model; the model with corrections
that nobody has trained; and corrections and LoRA after 24 updates, as `real_boost` trains them. Run with ``make real``
done and ``pip install lm-eval==0.4.13``; records that are there are not made again:

    python benchmarks/real_questions.py

Prediction, written before any of its runs. Untrained corrections give the answers of the model, every one. After 24
updates, which lower the loss by 0.05 and 0.08 nats, accuracy moves by less than these questions can show: of both arms
the 95 % interval over questions of the difference from the model, mean of three seeds, holds zero.
"""

import argparse
import json
import random
import tempfile
from pathlib import Path

import torch
from real_boost import EXPERIMENT as TRAINED
from real_boost import SEEDS, Upper, adapted, fit, lower, texts

from gbattn.conventions import Record, load_records
from gbattn.corpora import python_docs
from gbattn.ground.records import experiment_folder
from gbattn.lab.real_model import load_smollm2

EXPERIMENT, TASK, UPDATES = "real-questions", "how_it_goes_on", 24
BEFORE, AFTER, CHOICES = 400, 100, 4


def questions(documents, number, seed=0):
    """Questions as dictionaries: the text before, the choices, and the place of the one that follows."""
    draw = random.Random(seed)
    long = [text for text in documents if len(text) >= BEFORE + (2 * CHOICES + 1) * AFTER]
    found = []
    for _ in range(number):
        text = draw.choice(long)
        start = draw.randrange(len(text) - BEFORE - AFTER)
        end = start + BEFORE
        rest = [at for at in range(0, len(text) - AFTER, AFTER) if at + AFTER <= start or at >= end + AFTER]
        places = [end, *draw.sample(rest, CHOICES - 1)]
        draw.shuffle(places)
        choices = [text[at : at + AFTER] for at in places]
        found.append(dict(before=text[start:end], choices=choices, own=places.index(end)))
    return found


def ask(model, tokenizer, asked, batch=8):
    """Whether each question is answered right, by the likelihood of the choices, as lm-eval says."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "questions.jsonl"
        file.write_text("".join(json.dumps(one) + "\n" for one in asked))
        task = dict(
            task=TASK,
            dataset_path="json",
            dataset_kwargs={"data_files": str(file)},
            test_split="train",
            output_type="multiple_choice",
            doc_to_text="{{before}}",
            doc_to_choice="{{choices}}",
            doc_to_target="{{own}}",
            target_delimiter="",
            metric_list=[{"metric": "acc"}],
        )
        reader = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch, device="cpu")
        found = simple_evaluate(model=reader, tasks=[task], log_samples=True, bootstrap_iters=0, verbosity="ERROR")
    samples = sorted(found["samples"][TASK], key=lambda sample: sample["doc_id"])
    return [int(sample["acc"]) for sample in samples]


def main():
    """All runs of the plan, each written when it is done; a second call continues the first."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--questions", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = experiment_folder(TRAINED).with_name(EXPERIMENT)
    folder.mkdir(exist_ok=True)  # beside it
    model, tokenizer = load_smollm2()
    asked = questions(list(python_docs()["test"].values()), options.questions)
    ids = texts(tokenizer, UPDATES)["train"]
    upper, text = Upper(model), (lower(model, ids), ids)
    rates = {r.settings["arm"]: r.settings["rate"] for r in load_records(TRAINED) if r.settings.get("text") == "test"}

    def run(name, make, **settings):
        if not (folder / f"{name}.json").is_file():
            right = ask(make().float().eval(), tokenizer, asked)
            settings |= dict(questions=len(asked), choices=CHOICES, before=BEFORE, after=AFTER)
            Record(EXPERIMENT, settings, dict(right=right)).save(name)
            print(f"{name}: {100 * sum(right) / len(right):.1f} %", flush=True)

    run("plain", lambda: adapted(model, "plain", 0, chosen=[])[0], arm="plain")
    run("start", lambda: adapted(model, "boost", 0)[0], arm="start")
    for seed in SEEDS:
        for arm in ("boost", "LoRA"):
            settings = dict(arm=arm, rate=rates[arm], seed=seed, updates=UPDATES)
            run(
                f"{arm}-{seed}",
                lambda s=settings: fit(model, upper, text, s["arm"], s["rate"], s["seed"], UPDATES)[0],
                **settings,
            )


if __name__ == "__main__":
    main()
