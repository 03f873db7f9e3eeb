"""The loop: what it leaves, how it is stopped, what it refuses and what it shows."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import tqdm
from refusals import refused
from torch import nn

from gbattn.corpora import TokenStream
from gbattn.lab.checkpoints import checkpoints
from gbattn.lab.training import display, show_point, train
from gbattn.training import History, RateGroup, evaluate, learning_rate
from models import LogitsAlone, compiled, wraps
from toys import (
    CORPUS,
    ENVIRONMENT,
    TOKENS,
    Interrupted,
    Toy,
    config,
    curve,
    finish,
    overfitting,
    run,
    small_model,
    start,
    stop_after,
    weights,
)


def test_a_point_of_the_history_is_a_mean_over_its_updates():
    history = run(log_every=8, steps=20)
    every = run(log_every=1, steps=20)
    assert history.step == [8, 16, 20] and history.tokens == [8 * 32, 16 * 32, 20 * 32]
    assert history.loss == pytest.approx([np.mean(every.loss[a:b]) for a, b in ((0, 8), (8, 16), (16, 20))], abs=1e-12)
    assert history.learning_rate == [every.learning_rate[i - 1] for i in (8, 16, 20)]
    assert history.seconds == sorted(history.seconds) and history.seconds[0] > 0
    assert history.best_loss == min(history.validation_loss) and history.finished
    assert History(**json.loads(json.dumps(history.to_dict()))) == history


def test_an_evaluation_comes_after_each_pass_over_the_text():
    history = run(steps=None, epochs=3, batch_size=6, evaluate_every=None)  # 100 windows
    assert history.step[-1] == 50 and history.validation_step == [17, 34, 50]


def test_the_best_weights_are_what_is_left():
    model, text, history = overfitting()
    assert 0 < history.best_step < 40 and not model.training
    assert evaluate(model, text.valid).loss == history.best_loss == min(history.validation_loss)
    model, text, last = overfitting(keep="last")
    assert evaluate(model, text.valid).loss == last.validation_loss[-1] > history.best_loss


def test_the_same_run_on_numpys_numbers_and_lists():
    as_lists = SimpleNamespace(train=CORPUS.train.tolist(), valid=CORPUS.valid.tolist())
    assert run(corpus=as_lists).loss == run().loss


def test_half_precision_keeps_the_weights():
    model = Toy()
    history = run(model, precision="bf16")
    assert weights(model).dtype == torch.float32
    exact = run(Toy())
    assert history.loss != exact.loss and history.loss == pytest.approx(exact.loss, rel=0.02)


def test_compiling_is_asked_for(monkeypatch, tmp_path):
    """What torch.compile is given, without the minutes that it takes."""
    asked, real = [], torch.compile

    def compiled(module, **options):
        asked.append(options)
        return real(module, backend="eager", **options)

    monkeypatch.setattr(torch, "compile", compiled)
    model = Toy(0.2)
    history = run(model, compile=True)
    assert asked == [{"dynamic": False}]
    assert history.loss == pytest.approx(run().loss, rel=1e-5)
    assert type(model) is Toy and "forward" not in vars(model)


def test_the_model_comes_out_as_it_went_in():
    model = Toy()
    names = dict(vars(model))
    run(model, precision="bf16")
    assert vars(model).keys() == names.keys() and model.forward.__func__ is Toy.forward
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("calls", [26, 27])  # before an update, and inside one, where half a gradient is left
def test_the_model_that_was_stopped_goes_on_bit_for_bit(tmp_path, calls):
    options = dict(steps=20, accumulation=2, checkpoint_every=5, log_every=1, keep="last")
    straight, stopped = Toy(dropout=0.2), Interrupted(calls)
    whole = run(straight, **options)
    with pytest.raises(KeyboardInterrupt):
        run(stopped, folder=tmp_path, **options)
    assert [*checkpoints(tmp_path)] == [10]
    assert run(stopped, folder=tmp_path, **options).loss == whole.loss
    assert torch.equal(weights(stopped), weights(straight))


class Signalled(Toy):
    """A toy that sends its own process signals, each in the middle of an update."""

    def __init__(self, calls, *signals):
        super().__init__(dropout=0.2)
        self.calls, self.signals = calls, signals

    def forward(self, *args, **options):
        self.calls -= self.training
        if self.training and self.calls == -1:
            for number in self.signals:
                os.kill(os.getpid(), number)
        return super().forward(*args, **options)


@pytest.fixture
def ctrl_c():
    """A shell that runs the tests in the background has told them to ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.skipif(os.name != "posix", reason="here no process gets such signals")
@pytest.mark.parametrize(("number", "end"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
@pytest.mark.parametrize("calls", [0, 13, 25, 39])  # of two in each update
def test_a_signal_lets_the_update_end_and_loses_none(tmp_path, number, end, calls, capsys):
    options = dict(steps=20, accumulation=2, log_every=4, keep="last")
    straight, stopped, resumed = Toy(dropout=0.2), Signalled(calls, number), Toy(dropout=0.2)
    whole = run(straight, **options)
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(end) as caught:
        run(stopped, folder=tmp_path, **options)
    step = calls // 2 + 1
    said = f"stopped after step {step}; the last good checkpoint is {checkpoints(tmp_path)[step]}"
    if number == signal.SIGTERM:
        assert caught.value.code == 143 and said in capsys.readouterr().err
    else:
        assert said in str(caught.value)
    assert handlers == (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
    assert curve(run(resumed, folder=tmp_path, **options)) == curve(whole)
    assert torch.equal(weights(resumed), weights(straight))


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.skipif(os.name != "posix", reason="here no process gets such signals")
def test_the_second_signal_acts_at_once_and_without_a_folder_the_first(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(Signalled(5, signal.SIGINT, signal.SIGINT), folder=tmp_path)
    assert not checkpoints(tmp_path)
    model = Signalled(5, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run(model)
    assert model.calls == -1


@pytest.mark.skipif(os.name != "posix", reason="here no process gets such signals")
def test_who_handles_a_signal_goes_on_doing_so(tmp_path):
    seen = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        assert run(Signalled(5, signal.SIGTERM), folder=tmp_path).finished
        assert seen == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_gradient_of_the_callers_is_not_used():
    straight, touched = Toy(), Toy()
    for p in touched.parameters():
        p.grad = torch.ones_like(p)
    assert curve(run(touched)) == curve(run(straight))
    assert torch.equal(weights(touched), weights(straight))


class Exploding(Toy):
    """A toy that goes wrong in the update after so many."""

    def __init__(self, after, what):
        super().__init__()
        self.after, self.what = after, what

    def forward(self, *args, **options):
        loss = super().forward(*args, **options)
        if self.training:
            self.after -= 1
        if self.after < 0 and self.training != (self.what == "validation"):
            if self.what == "gradient":
                zero = self.head.bias.sum() - self.head.bias.sum().detach()
                return loss + zero.sqrt()  # the loss is what it was, its gradient is not
            return loss * (torch.inf if self.what == "infinite loss" else torch.nan)
        return loss


@pytest.mark.parametrize("log_every", [1, 7, 50])
def test_a_loss_that_is_not_finite_is_named_and_the_last_good_checkpoint_stays(tmp_path, log_every):
    model = Exploding(13, "loss")
    good = run(Toy(), steps=50, evaluate_every=50, log_every=1)
    with pytest.raises(FloatingPointError) as error:
        run(model, folder=tmp_path, steps=50, checkpoint_every=4, evaluate_every=50, log_every=log_every)
    message = str(error.value)
    rate = learning_rate(config(steps=50), 13, 50)
    assert message.startswith(f"loss is nan in step 13, at learning rate {rate:.3g}, on the batch ")
    assert "TokenStream(corpus.train, 8, 4, 0).batch(13)" in message and "step-00000012" in message
    corpus = CORPUS  # the name in the message
    named = eval(message.split("the batch ")[1].split(";")[0], {"TokenStream": TokenStream, "corpus": corpus})
    assert torch.equal(named.inputs, model.seen[13])
    assert [*checkpoints(tmp_path)] == [12]
    resumed = run(Toy(), folder=tmp_path, steps=50, evaluate_every=50, log_every=log_every)
    assert resumed.validation_loss == good.validation_loss


def test_an_infinite_loss():
    with pytest.raises(FloatingPointError, match="loss is inf in step 5"):
        run(Exploding(5, "infinite loss"), steps=20)


def test_a_gradient_that_is_not_finite():
    with pytest.raises(FloatingPointError, match="gradient norm is (inf|nan) in step 5"):
        run(Exploding(5, "gradient"), steps=20)


@pytest.mark.parametrize("updates", [10, 20])  # in the middle, and at the end
def test_a_validation_loss_that_is_not_finite(updates):
    step = updates - 1
    with pytest.raises(FloatingPointError, match=f"validation loss is nan after step {step}"):
        run(Exploding(step, "validation"), steps=20, evaluate_every=10)


@pytest.mark.parametrize(
    "options, argument",
    [
        ({"warmup_steps": 20}, "warmup_steps"),
        ({"length": 900}, "tokens"),
        ({"corpus": SimpleNamespace(train=TOKENS, valid=TOKENS[:1])}, "corpus"),
        ({"corpus": SimpleNamespace(**vars(CORPUS), vocab_size=21)}, "model"),
        ({"model": nn.Linear(2, 2)}, "length"),
        ({"model": Toy().requires_grad_(False)}, "model"),
    ],
)
def test_train_names_what_is_wrong(options, argument):
    with refused(argument):
        run(**options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a GPU")
def test_an_update_is_captured_on_a_gpu_only():
    for capture in (True, 1):
        with refused("capture"):
            train(Toy(), CORPUS, config(), progress=False, capture=capture)


@pytest.mark.parametrize("wrong", [dict(folder=""), dict(corpus="docs"), dict(config={"steps": 3})])
def test_what_cannot_be_trained_is_named(wrong):
    arguments = dict(corpus=CORPUS, config=config()) | wrong
    with refused(*wrong):
        train(Toy(), progress=False, **arguments)


@wraps
def test_a_compiled_model_is_called_as_it_was_compiled():
    calls = []

    def backend(graph, inputs):
        return lambda *args: calls.append(1) or graph(*args)

    evaluate(compiled(LogitsAlone(), backend), TOKENS)
    scored = len(calls)
    run(compiled(LogitsAlone(), backend))
    assert scored and len(calls) > 2 * scored


@wraps
def test_rates_are_for_the_names_of_a_compiled_model_or_of_the_plain_one():
    for name in ("head.weight", "_orig_mod.head.weight"):
        model, held = compiled(Toy()), RateGroup((name,), lambda *_: 0.0)
        train(model, CORPUS, config(), rates=[held], progress=False)
        assert torch.equal(model.head.weight, Toy().head.weight)
        assert not torch.equal(model.head.bias, Toy().head.bias)


def test_a_compilation_that_fails_is_one_sentence(tmp_path):
    code = "from toys import run\ntry:\n    run(compile=True)\n"
    code += "except RuntimeError as error:\n    print(error)"
    nothing = {"CXX": str(tmp_path / "nothing"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", code]
    said = subprocess.run(command, check=True, capture_output=True, text=True, env=ENVIRONMENT | nothing)
    assert re.fullmatch("torch.compile failed: .{9,200}; compile=False trains without it\n", said.stdout)


@pytest.mark.parametrize("name", ["progress", "tensorboard"])
def test_a_flag_is_a_truth_value(name, tmp_path):
    with refused(name):
        train(Toy(), CORPUS, config(), folder=tmp_path, **{name: "False"})
    assert not list(tmp_path.iterdir())


def test_two_trainings_in_one_folder_are_refused(tmp_path):
    """Each would remove what the other writes; and what was held is free when a run ends, however it ends."""

    class Second(Toy):
        def forward(self, *inputs, **options):
            with refused("folder"):
                run(folder=tmp_path)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(Second(), folder=tmp_path)
    assert run(folder=tmp_path).finished


@pytest.mark.parametrize("package", ["accelerate", "filelock", "safetensors"])
def test_a_missing_package_is_named_before_the_work(package, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with refused(package, "gbattn[train]"):
        run(folder=tmp_path)
    assert not list(tmp_path.iterdir())
    if package != "accelerate":  # without checkpoints they are not needed
        assert run().finished


@pytest.mark.skipif(
    shutil.which("g++") is None or " " in torch.__file__,
    reason="torch compiles with g++, and not where its own path has a space",
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # what torch says of itself when it begins to compile
def test_a_compiled_run_that_was_stopped_goes_on_bit_for_bit(tmp_path, monkeypatch):
    options = dict(compile=True, checkpoint_every=3)
    straight, resumed = small_model(), small_model()
    whole = run(straight, **options)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        stop_after(patched, 4)
        run(small_model(), folder=tmp_path, **options)
    assert max(checkpoints(tmp_path)) == 3
    assert curve(run(resumed, folder=tmp_path, **options)) == curve(whole)
    assert torch.equal(weights(resumed), weights(straight))


def test_tensorboard_needs_a_folder():
    with refused("tensorboard"):
        train(Toy(), CORPUS, config(), tensorboard=True)


@pytest.mark.parametrize("place", ["a.txt", "a.txt/sub"])
def test_a_file_in_the_place_of_the_folder_is_refused_at_once(tmp_path, place):
    (tmp_path / "a.txt").write_text("no folder")
    model = Toy()
    with refused("folder"):
        run(model, folder=tmp_path / place)
    assert not model.seen


def test_the_progress_bar_ends_with_all_numbers_on_standard_error(capsys):
    train(Toy(), CORPUS, config(log_every=5))
    shown = capsys.readouterr()
    assert shown.out == ""
    last = shown.err.replace("\r", "\n").strip().splitlines()[-1]
    for part in ("100%", "20/20", "loss ", "tokens/s", "valid "):
        assert part in last
    train(Toy(), CORPUS, config(), progress=False)
    assert capsys.readouterr() == ("", "")


def test_a_terminal_of_80_columns_has_room_for_the_bar_and_all_numbers(capsys, monkeypatch):
    """Those of a long run, too."""
    bar = partial(tqdm.tqdm, ncols=80, mininterval=0)
    monkeypatch.setattr("tqdm.tqdm", bar)
    run = SimpleNamespace(step=123_000, steps=400_000, accelerator=SimpleNamespace(is_main_process=True))
    with display(run, progress=True, tensorboard=False) as show:
        run.step += 10_000
        show({}, valid="valid 4.321")
        show_point(show, History([run.step], [4.123], [1.0], [1e-3], [12_345], [1.0]))
    for line in capsys.readouterr().err.replace("\r", "\n").splitlines():
        assert len(line) <= 80
        shown = line
    filled, bar, numbers = shown.split("|")
    assert len(bar) >= 5 and all(part in numbers for part in ("133000/400000", "loss 4.123", "12,345 tokens/s"))
    assert "valid 4.321" in numbers


@pytest.mark.filterwarnings("ignore")  # of TensorBoard's own reader
def test_tensorboard_has_each_point_once_after_a_stop(tmp_path, monkeypatch):
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        stop_after(patched, 13)
        train(Toy(), CORPUS, config(), folder=tmp_path, progress=False, tensorboard=True)
    history = train(Toy(), CORPUS, config(), folder=tmp_path, progress=False, tensorboard=True)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(tmp_path / "tensorboard"))
    reader.Reload()
    training_loss = reader.Scalars("loss/training")
    assert [e.step for e in training_loss] == history.step  # what was written twice is there once
    assert [e.value for e in training_loss] == pytest.approx(history.loss, rel=1e-6)
    assert [e.value for e in reader.Scalars("loss/validation")] == pytest.approx(history.validation_loss, rel=1e-6)
    assert {"gradient norm", "learning rate", "tokens per second"} <= set(reader.Tags()["scalars"])


def test_killed_at_any_moment_and_started_again(tmp_path, script):
    given = json.dumps(config(steps=600, checkpoint_every=7, evaluate_every=60, log_every=5).to_dict())
    folder = tmp_path / "run"
    whole = start([script, given, "", 0.3])
    moments, kills, newest = random.Random(0), 0, 0
    while kills < 2:
        process = start([script, given, folder, 0.3])
        while process.poll() is None and max(checkpoints(folder), default=0) <= newest:
            time.sleep(0.002)
        time.sleep(moments.uniform(0, 0.05))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        kills += process.returncode == -signal.SIGKILL
        newest = max(checkpoints(folder), default=0)
        assert newest < 600, "finished before it could be killed"
    resumed = finish(start([script, given, folder, 0.3]))
    assert resumed == finish(whole)


def test_importing_loads_nothing_that_is_an_extra():
    code = (
        "import sys, gbattn.training; "
        "print([m for m in ('accelerate', 'safetensors', 'tensorboard') if m in sys.modules])"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]"
    )
