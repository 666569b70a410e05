"""The command line: train, risk, evaluate, combine, say, demo."""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import torch
from tqdm import tqdm

from docs.examples.g2p import data, processes
from docs.examples.g2p.checkpoint import CheckpointError, load_model
from docs.examples.g2p.combine import WEIGHTS, JointNGrams, Opinions
from docs.examples.g2p.data import DataError, Lexicon, Vocabulary
from docs.examples.g2p.model import G2P
from docs.examples.g2p.plot import learning_curve
from docs.examples.g2p.scoring import Score, n_best, pronounce, score
from docs.examples.g2p.train import Settings, Trainer

RUNS = Path("runs") / "g2p"
SIZES = {
    "small": Settings(epochs=8, hidden=128, embed=64, batch_size=128, learning_rate=4e-3, dropout=0.1),
    "full": Settings(compile=True),
}
DEMO_WORDS = 24_000
DEMO_EPOCHS = 5  # and one of minimum risk, which takes as long as four of them
DEMO_DEV_WORDS = 500
DEMO_TEST_WORDS = 1_000
DEMO_SAYS = ("TENSOR", "BACKPROPAGATION", "GRADIENTLY", "KUBERNETES", "XYLOPHONIST", "O'BRIENESQUE")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code: 0 done, 2 bad input (one line on stderr), 130 interrupted."""
    options = _parser().parse_args(arguments)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    try:
        options.command(options)
    except (DataError, CheckpointError, FloatingPointError) as error:
        print(f"g2p: {error}", file=sys.stderr)
        return 2
    except OSError as error:  # a full disk, a folder that may not be written
        print(f"g2p: {error.filename or 'file'}: {error.strerror or error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("g2p: interrupted; what was saved can go on with --resume", file=sys.stderr)
        return 130
    return 0


def _at_least_one(text: str, least: int = 1) -> int:
    value = int(text)
    if value < least:
        raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
    return value


def _at_least_two(text: str) -> int:
    return _at_least_one(text, 2)


def _not_negative(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number and at least 0, got {text}")
    return value


def _positive(text: str) -> float:
    value = _not_negative(text)
    if value == 0:
        raise argparse.ArgumentTypeError("must be above 0, got 0")
    return value


def _share(text: str) -> float:
    value = _not_negative(text)
    if value >= 1:
        raise argparse.ArgumentTypeError(f"must be below 1, got {text}")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m docs.examples.g2p", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--threads", type=_at_least_one, help="threads of PyTorch (default: its own choice)")
    model = argparse.ArgumentParser(add_help=False)
    model.add_argument("--checkpoint", type=Path, default=RUNS / "full" / "model.pt", help="default: %(default)s")
    run = _run_options()
    train = commands.add_parser("train", parents=[shared, run], help="train a model on CMUdict")
    train.add_argument("--run", type=Path, default=RUNS / "full", help="folder of the run (default: %(default)s)")
    train.add_argument("--epochs", type=_at_least_one, help="passes over the data (default: by size)")
    train.add_argument("--risk-epochs", type=_at_least_one, help="passes of minimum risk after them (default: none)")
    train.add_argument("--checkpoint", type=Path, metavar="MODEL", help="train this model on (default: a new one)")
    train.set_defaults(command=_train)
    risk = commands.add_parser("risk", parents=[shared, run, model], help="train a model on by minimum risk")
    risk.add_argument("--run", type=Path, default=RUNS / "risk", help="folder of the run (default: %(default)s)")
    risk.add_argument(
        "--risk-epochs", type=_at_least_one, default=3, help="passes over the data (default: %(default)s)"
    )
    risk.set_defaults(command=_train, epochs=0)
    evaluate = commands.add_parser("evaluate", parents=[shared, model], help="error rates of a model")
    evaluate.add_argument("--split", choices=("test", "dev"), default="test")
    evaluate.add_argument("--limit", type=_at_least_one, help="score a fixed sample of so many words (default: all)")
    evaluate.add_argument("--data", type=Path, help="lexicon to score on (default: that of the split)")
    beams = {"nargs": "*", "type": _at_least_one, "default": [1, 4, 8], "metavar": "K"}
    evaluate.add_argument("--beam", **beams, help="sizes of the beam searches to score beside greedy (default: 1 4 8)")
    evaluate.set_defaults(command=_evaluate)
    combine = commands.add_parser(
        "combine", parents=[shared], help="error rates of several models and n-grams together"
    )
    combine.add_argument("models", nargs="+", type=Path, metavar="MODEL", help="of the same letters and phones")
    combine.add_argument("--data", type=Path, default=data.TRAIN_FILE, help="lexicon that they were trained on")
    combine.add_argument("--test", type=Path, default=data.TEST_FILE, help="lexicon to score on")
    combine.add_argument("--limit", type=_at_least_one, help="score a fixed sample of so many words (default: all)")
    combine.add_argument("--beam", type=_at_least_one, default=8, metavar="K", help="proposals (default: %(default)s)")
    combine.set_defaults(command=_combine)
    say = commands.add_parser("say", parents=[shared, model], help="pronounce words")
    say.add_argument("words", nargs="+", metavar="WORD")
    say.add_argument("--beam", type=_at_least_one, default=8, metavar="K", help="default: %(default)s")
    say.add_argument("--n-best", type=_at_least_one, default=4, metavar="N", help="so many each (default: %(default)s)")
    say.set_defaults(command=_say)
    demo = commands.add_parser("demo", help="train a small model and show what it does (3 minutes)")
    demo.add_argument("--run", type=Path, default=RUNS / "demo", help="folder of the run (default: %(default)s)")
    demo.add_argument("--limit", type=_at_least_one, default=DEMO_WORDS, help="words to train on")
    # Two threads save a fifth of the time on an idle machine, and lose many times that on a busy one.
    demo.add_argument("--threads", type=_at_least_one, default=1, help="threads of PyTorch (default: %(default)s)")
    demo.set_defaults(command=_demo)
    return parser


def _run_options() -> argparse.ArgumentParser:
    """What every training run takes. Options that are not given (None) leave the settings as the size has them."""
    run = argparse.ArgumentParser(add_help=False)
    run.add_argument("--size", choices=SIZES, default="full", help="size of the model and the run")
    run.add_argument("--limit", type=_at_least_one, help="train on so many words (default: all)")
    run.add_argument("--seed", type=int, default=0)
    run.add_argument(
        "--backwards", action="store_true", default=None, help="write the last phone first: to `combine` with another"
    )
    run.add_argument("--resume", action="store_true", help="go on with the run in this folder, if it has begun")
    run.add_argument("--learning-rate", type=_positive, metavar="RATE", help="the highest (default: by size)")
    run.add_argument(
        "--dropout", type=_share, metavar="SHARE", help="of units at once (default: by size or checkpoint)"
    )
    run.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=None, help="the decoder's loop (default: by size)"
    )
    run.add_argument("--save-every", type=float, default=60.0, metavar="SECONDS", help="time between checkpoints")
    run.add_argument("--data", type=Path, default=data.TRAIN_FILE, help="lexicon to train on")
    risk = run.add_argument_group("the risk phase")
    # The gold pronunciation is one of the list: with another to compare it with, there is something to learn.
    risk.add_argument("--beam", type=_at_least_two, metavar="K", help="hypotheses of a search (default: 4)")
    risk.add_argument("--alpha", type=_positive, help="sharpness of the probabilities (default: 1)")
    risk.add_argument("--entropy", type=_not_negative, help="weight of cross entropy (default: by size)")
    risk.add_argument("--risk-rate", type=_positive, help="learning rate, as a share of the other (default: by size)")
    risk.add_argument("--per-phone", action="store_true", default=None, help="divide edits by the word's phones")
    return run


def _settings(options: argparse.Namespace) -> Settings:
    given = {field.name: getattr(options, field.name, None) for field in fields(Settings)}
    return replace(SIZES[options.size], **{name: value for name, value in given.items() if value is not None})


def _split(path: Path, limit: int | None) -> tuple[Lexicon, Lexicon, Vocabulary]:
    """Training words (a sample of ``limit``), development words, and the vocabulary of the whole file."""
    lexicon = data.read_lexicon(path)
    n_dev = min(data.DEV_WORDS, max(1, len(lexicon) // 10))
    if len(lexicon) < 2:
        raise DataError(f"{path}: needs at least two words, one to train on and one to check on")
    train, dev = data.split_dev(lexicon, n_dev)
    return data.sample(train, limit), dev, Vocabulary.of(lexicon)


def _train(options: argparse.Namespace) -> None:
    """Train from random weights, or on from those of ``options.checkpoint``."""
    _refuse_to_overwrite(options)
    settings, model = _settings(options), None
    train, dev, vocabulary = _split(options.data, options.limit)
    if options.checkpoint:
        model, found = load_model(options.checkpoint)
        if found != vocabulary:
            raise CheckpointError(f"{options.checkpoint}: has other letters or phones than {options.data}")
        kept = ("hidden", "embed", "backwards", "dropout")[: 4 if options.dropout is None else 3]
        settings = replace(settings, **{name: getattr(model.config, name) for name in kept})
    with processes.joined():
        trainer = Trainer(options.run, train, dev, vocabulary, settings)
        trainer.folder.mkdir(parents=True, exist_ok=True)  # if it cannot be made, say so before an epoch is spent
        if options.resume and _has_begun(options.run):
            trainer.resume()
        elif model:
            trainer.begin_from(model)
        _fit(trainer, options.save_every)


def _has_begun(run: Path) -> bool:
    """Whether there is a checkpoint to go on from; a run that was stopped before its first begins anew."""
    if (run / "training.pt").exists():
        return True
    if processes.is_first():
        print(f"g2p: {run} holds no training.pt to go on from: beginning from the start", file=sys.stderr)
    return False


def _refuse_to_overwrite(options: argparse.Namespace) -> None:
    if not options.resume and (options.run / "training.pt").exists():
        raise CheckpointError(f"{options.run}: holds a run; go on with --resume, or take another folder with --run")


def _fit(trainer: Trainer, save_every: float) -> None:
    folder = trainer.folder
    folder.mkdir(parents=True, exist_ok=True)
    trainer.run(save_every)
    if not processes.is_first():
        return
    learning_curve(trainer.history, folder / "learning_curve.png")
    files = ("model.pt", "history.json", "learning_curve.png")
    print("model {}, history {}, picture {}".format(*(folder / name for name in files)))


def _evaluate(options: argparse.Namespace) -> None:
    model, vocabulary = load_model(options.checkpoint)
    if options.split == "dev":
        _, lexicon, _ = _split(options.data or data.TRAIN_FILE, None)
    else:
        lexicon = data.read_lexicon(options.data or data.TEST_FILE)
    lexicon = data.sample(lexicon, options.limit)
    for beam in (None, *options.beam):
        print(f"{options.split}, {_named(beam)}: {_result(model, vocabulary, lexicon, beam)}")


def _combine(options: argparse.Namespace) -> None:
    """The weight of the n-grams is the one with the fewest wrong development words, which they have not seen either."""
    train, dev, vocabulary = _split(options.data, None)
    test = data.sample(data.read_lexicon(options.test), options.limit)
    models = []
    for path in options.models:
        model, found = load_model(path)
        if found != vocabulary:
            raise CheckpointError(f"{path}: has other letters or phones than {options.data}")
        models.append(model)
    ngrams = JointNGrams(train, vocabulary, progress=tqdm)
    seen, unseen = (Opinions.of(list(words), models, vocabulary, ngrams, options.beam, tqdm) for words in (dev, test))
    wrong = {weight: score(seen.best(weight), dev).wrong_words for weight in WEIGHTS}
    weight = min(WEIGHTS, key=lambda one: wrong[one])
    print(f"Each proposes its {options.beam} best; the development words choose a weight of {weight} for the n-grams.")
    for opinions, words, name in ((seen, dev, "dev"), (unseen, test, "test")):
        for n, path in enumerate(options.models):
            print(f"{name}, {path} alone: {score(opinions.best_of(n), words)}")
        print(f"{name}, models together: {score(opinions.best(), words)}")
        print(f"{name}, with n-grams: {score(opinions.best(weight), words)}")


def _say(options: argparse.Namespace) -> None:
    model, vocabulary = load_model(options.checkpoint)
    words = [word.upper() for word in options.words]
    for word, found in n_best(model, vocabulary, words, options.beam, options.n_best).items():
        for log_prob, phones in found:
            print(f"{word}\t{log_prob:.2f}\t{' '.join(phones)}")


def _demo(options: argparse.Namespace) -> None:
    started = time.monotonic()
    train, dev, vocabulary = _split(data.TRAIN_FILE, options.limit)
    print(f"Training a small model on {len(train)} of CMUdict's words; the full one is `train` without options.")
    print("First by cross entropy, then by minimum risk: the edits that a beam search is expected to make.")
    settings = replace(SIZES["small"], epochs=DEMO_EPOCHS, risk_epochs=1)
    _fit(Trainer(options.run, train, data.sample(dev, DEMO_DEV_WORDS), vocabulary, settings), 60.0)
    test = data.sample(data.read_lexicon(data.TEST_FILE), DEMO_TEST_WORDS)
    print(f"\n{len(test)} of the test words, none of them seen in training:")
    for title, name in (("before the risk phase", "before_risk.pt"), ("after it", "model.pt")):
        model, vocabulary = load_model(options.run / name)
        for beam in (None, 4):
            print(f"  {title + ', ' + _named(beam):<33} {_result(model, vocabulary, test, beam)}")
    print("\nWords that no dictionary has, with log-probabilities:")
    for word, found in n_best(model, vocabulary, DEMO_SAYS, beam=8, n=3).items():
        for log_prob, phones in found:
            print(f"  {word:<16} {log_prob:6.2f}  {' '.join(phones)}")
    print(f"\nLearning curve: {options.run / 'learning_curve.png'}  ({time.monotonic() - started:.0f} s in all)")


def _named(beam: int | None) -> str:
    return "greedy" if beam is None else f"beam {beam}"


def _result(model: G2P, vocabulary: Vocabulary, lexicon: Lexicon, beam: int | None) -> Score:
    return score(pronounce(model, vocabulary, list(lexicon), progress=tqdm, beam=beam), lexicon)
