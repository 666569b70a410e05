"""The command line: train, compare."""

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm import tqdm

import tensorloop as tl
from docs.examples.speech import sound
from docs.examples.speech.compare import report
from docs.examples.speech.data import Words, make_words
from docs.examples.speech.model import Config, Conformer
from docs.examples.speech.train import Budget, Model, by_beam, greedy, train, wrong
from docs.examples.speech.transducer import Transducer

RUN = Path("runs") / "speech"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code: 0 done, 2 bad input (one line on stderr), 130 interrupted."""
    options = parser().parse_args(arguments)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    try:
        options.command(options)
    except (OSError, ValueError) as error:
        print(f"speech: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("speech: interrupted", file=sys.stderr)
        return 130
    return 0


def parser() -> argparse.ArgumentParser:
    whole = argparse.ArgumentParser(prog="python -m docs.examples.speech", description=__doc__)
    commands = whole.add_subparsers(required=True, metavar="COMMAND")
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--words", type=at_least_one, default=2000, help="words to train on (default: %(default)s)")
    shared.add_argument("--tones", action="store_true", help=f"tones in place of {sound.PROGRAM}")
    shared.add_argument("--transducer", action="store_true", help="a transducer beside CTC")
    shared.add_argument("--width", type=at_least_one, default=128, help="of the model (default: %(default)s)")
    shared.add_argument("--blocks", type=at_least_one, default=4, help="of the model (default: %(default)s)")
    shared.add_argument("--seed", type=int, default=0)
    shared.add_argument("--threads", type=at_least_one, help="threads of PyTorch (default: its own choice)")
    fit = commands.add_parser("train", parents=[shared], help="train, and write what words of others sound like")
    fit.add_argument("--minutes", type=float, default=5.0, help="of training (default: %(default)s)")
    fit.add_argument("--updates", type=at_least_one, help="end after so many (default: when the time is over)")
    fit.add_argument("--dev-words", type=at_least_one, default=200, help="words to check on (default: %(default)s)")
    fit.add_argument("--beam", type=at_least_one, default=8, help="hypotheses of the search (default: %(default)s)")
    fit.add_argument("--run", type=Path, default=RUN, help="folder for model.pt (default: %(default)s)")
    fit.set_defaults(command=run_train)
    compare = commands.add_parser("compare", parents=[shared], help="time and bytes beside the padded model")
    compare.add_argument("--rows", type=at_least_one, default=32, help="of the batch (default: %(default)s)")
    compare.add_argument("--rounds", type=at_least_one, default=5, help="of which the medians are (%(default)s)")
    compare.set_defaults(command=run_compare)
    return whole


def at_least_one(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def run_train(options: argparse.Namespace) -> None:
    options.run.mkdir(parents=True, exist_ok=True)  # if it cannot be made, say so before the time is spent
    words, model = words_and_model(options, options.dev_words)
    losses = train(model, words.train, Budget(options.minutes, options.updates), seed=options.seed)
    torch.save({"config": tuple(model.config), "phones": words.phones, "weights": model.state_dict()}, file_of(options))
    print(
        f"{len(losses)} updates; the last loss {losses[-1]:.3f}; model {file_of(options)}" if losses else "no updates"
    )
    for title, decode in (("greedy", greedy(model)), (f"beam {options.beam}", by_beam(model, options.beam))):
        print(
            f"{title}: {wrong(model, words.dev, decode):.2%} of the phones of {len(words.dev)} unseen words are wrong"
        )
    show(model, words, options.beam)


def file_of(options: argparse.Namespace) -> Path:
    return options.run / "model.pt"


@torch.no_grad()
def show(model: Model, words: Words, beam: int, rows: int = 4) -> None:
    for frames, labels in random.Random(0).sample(words.dev, min(rows, len(words.dev))):
        found = by_beam(model, beam)(model(tl.PackedTensor(frames, [len(frames)])))
        print(f"  {words.written(labels.tolist()):<32} {words.written(found.values.tolist())}")


def run_compare(options: argparse.Namespace) -> None:
    words, model = words_and_model(options, 1)
    for line in report(model, words.train[: options.rows], options.rounds):
        print(line)


def words_and_model(options: argparse.Namespace, dev_words: int) -> tuple[Words, Model]:
    voice = sound.has_voice() and not options.tones
    if not voice and not options.tones:
        print(f"speech: {sound.PROGRAM} is not installed; these are tones", file=sys.stderr)
    torch.manual_seed(options.seed)
    words = make_words(
        options.words,
        dev_words,
        voice=voice,
        seed=options.seed,
        progress=lambda rows: tqdm(rows, desc="speak" if voice else "tones"),
    )
    config = Config(sound.MELS, len(words.phones) + 1, options.width, options.blocks)
    return words, (Transducer if options.transducer else Conformer)(config)
