"""The command line: train, evaluate, say, demo."""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

from docs.examples.g2p import data, processes
from docs.examples.g2p.checkpoint import CheckpointError, load_model
from docs.examples.g2p.data import DataError, Lexicon, Vocabulary
from docs.examples.g2p.model import G2P
from docs.examples.g2p.plot import learning_curve
from docs.examples.g2p.scoring import Score, pronounce, score
from docs.examples.g2p.train import Settings, Trainer

RUNS = Path("runs") / "g2p"
SIZES = {
    "small": Settings(epochs=8, hidden=128, embed=64, batch_size=128, learning_rate=4e-3, dropout=0.1),
    "full": Settings(),
}
DEMO_WORDS = 24_000  # about 100 s of training
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


def _at_least_one(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m docs.examples.g2p", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--threads", type=_at_least_one, help="threads of PyTorch (default: its own choice)")
    train = commands.add_parser("train", parents=[shared], help="train a model on CMUdict")
    train.add_argument("--run", type=Path, default=RUNS / "full", help="folder of the run (default: %(default)s)")
    train.add_argument("--size", choices=SIZES, default="full", help="size of the model and the run")
    train.add_argument("--epochs", type=_at_least_one, help="passes over the data (default: by size)")
    train.add_argument("--limit", type=_at_least_one, help="train on so many words (default: all)")
    train.add_argument("--seed", type=int, default=0)
    train.add_argument("--resume", action="store_true", help="go on with the run in this folder")
    train.add_argument("--save-every", type=float, default=60.0, metavar="SECONDS", help="time between checkpoints")
    train.add_argument("--data", type=Path, default=data.TRAIN_FILE, help="lexicon to train on")
    train.set_defaults(command=_train)
    model = argparse.ArgumentParser(add_help=False)
    model.add_argument("--checkpoint", type=Path, default=RUNS / "full" / "model.pt", help="default: %(default)s")
    evaluate = commands.add_parser("evaluate", parents=[shared, model], help="error rates of a model")
    evaluate.add_argument("--split", choices=("test", "dev"), default="test")
    evaluate.add_argument("--limit", type=_at_least_one, help="score a fixed sample of so many words (default: all)")
    evaluate.add_argument("--data", type=Path, help="lexicon to score on (default: that of the split)")
    evaluate.set_defaults(command=_evaluate)
    say = commands.add_parser("say", parents=[shared, model], help="pronounce words")
    say.add_argument("words", nargs="+", metavar="WORD")
    say.set_defaults(command=_say)
    demo = commands.add_parser("demo", help="train a small model and show what it does (3 minutes)")
    demo.add_argument("--run", type=Path, default=RUNS / "demo", help="folder of the run (default: %(default)s)")
    demo.add_argument("--limit", type=_at_least_one, default=DEMO_WORDS, help="words to train on")
    # Two threads save a fifth of the time on an idle machine, and lose many times that on a busy one.
    demo.add_argument("--threads", type=_at_least_one, default=1, help="threads of PyTorch (default: %(default)s)")
    demo.set_defaults(command=_demo)
    return parser


def _split(path: Path, limit: int | None) -> tuple[Lexicon, Lexicon, Vocabulary]:
    """Training words (a sample of ``limit``), development words, and the vocabulary of the whole file."""
    lexicon = data.read_lexicon(path)
    n_dev = min(data.DEV_WORDS, max(1, len(lexicon) // 10))
    if len(lexicon) < 2:
        raise DataError(f"{path}: needs at least two words, one to train on and one to check on")
    train, dev = data.split_dev(lexicon, n_dev)
    return data.sample(train, limit), dev, Vocabulary.of(lexicon)


def _train(options: argparse.Namespace) -> None:
    settings = replace(SIZES[options.size], seed=options.seed)
    if options.epochs is not None:
        settings = replace(settings, epochs=options.epochs)
    if not options.resume and (options.run / "training.pt").exists():
        raise CheckpointError(f"{options.run}: holds a run; go on with --resume, or take another folder with --run")
    with processes.joined():
        trainer = Trainer(options.run, *_split(options.data, options.limit), settings)
        if options.resume:
            trainer.resume()
        _fit(trainer, options.save_every)


def _fit(trainer: Trainer, save_every: float) -> None:
    folder = trainer.folder
    folder.mkdir(parents=True, exist_ok=True)  # if it cannot be made, say so before an epoch is spent
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
    print(f"{options.split}: {_result(model, vocabulary, lexicon)}")


def _say(options: argparse.Namespace) -> None:
    model, vocabulary = load_model(options.checkpoint)
    words = [word.upper() for word in options.words]
    for word, phones in pronounce(model, vocabulary, words).items():
        print(f"{word}\t{' '.join(phones)}")


def _demo(options: argparse.Namespace) -> None:
    started = time.monotonic()
    train, dev, vocabulary = _split(data.TRAIN_FILE, options.limit)
    print(f"Training a small model on {len(train)} of CMUdict's words; the full one is `train` without options.")
    _fit(Trainer(options.run, train, data.sample(dev, DEMO_DEV_WORDS), vocabulary, SIZES["small"]), 60.0)
    model, vocabulary = load_model(options.run / "model.pt")
    test = data.sample(data.read_lexicon(data.TEST_FILE), DEMO_TEST_WORDS)
    print("\nA fixed sample of the test words, none of them seen in training:")
    print(f"  {_result(model, vocabulary, test)}\n")
    for word, phones in pronounce(model, vocabulary, DEMO_SAYS).items():
        print(f"  {word:<16} {' '.join(phones)}")
    print(f"\nLearning curve: {options.run / 'learning_curve.png'}  ({time.monotonic() - started:.0f} s in all)")


def _result(model: G2P, vocabulary: Vocabulary, lexicon: Lexicon) -> Score:
    return score(pronounce(model, vocabulary, list(lexicon), progress=tqdm), lexicon)
