"""Minimum risk against cross entropy for as long: a trained model of the example g2p goes on by either.

    python profiling/g2p_risk.py                   # 80 minutes in one thread, from the model of `g2p train`
    python profiling/g2p_risk.py --seeds 1         # a part of it; what is done is not done again
    python profiling/g2p_risk.py --report          # the table again, from the results there are

Every run goes on from the same model, with batches and dropout of its own seed, an optimizer that starts anew and a
learning rate that goes up and down once, the same for both. An epoch of risk takes about four of cross entropy, so
that is how many the latter has. The last averaged weights are scored, not the best of several. Seconds are of the
processor, in one thread. A run that is stopped goes on when the script is started again.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from pages import captions
from running import harness
from tqdm import tqdm

from docs.examples.g2p import data
from docs.examples.g2p.checkpoint import load_model
from docs.examples.g2p.cli import SIZES
from docs.examples.g2p.model import G2P
from docs.examples.g2p.scoring import pronounce, score
from docs.examples.g2p.train import Settings, Trainer

NAME, README = "g2p_risk", "docs/examples/g2p/README.md"
RUNS = harness.ROOT / "runs" / "g2p"
WAYS = {"entropy": "cross entropy", "risk": "minimum risk"}
EPOCHS = {"risk": {"epochs": 0, "risk_epochs": 1}, "entropy": {"epochs": 4, "risk_epochs": 0}}
BEAM = 4


def settings(way: str, seed: int, rate: float, entropy: float) -> Settings:
    full = SIZES["full"]
    peak = {"learning_rate": rate * full.learning_rate} if way == "entropy" else {"risk_rate": rate, "entropy": entropy}
    return replace(full, seed=seed, **EPOCHS[way], **peak)


def scores(model: G2P, vocabulary: data.Vocabulary, sets: dict[str, data.Lexicon]) -> dict[str, float]:
    """PER and WER of greedy decoding and of a search, on each of the sets."""
    found: dict[str, float] = {}
    for name, lexicon in sets.items():
        for beam in (None, BEAM):
            result = score(pronounce(model, vocabulary, list(lexicon), progress=tqdm, beam=beam), lexicon)
            how = f"{name}, beam {beam}" if beam else f"{name}, greedy"
            found |= {f"{how}, PER": result.per, f"{how}, WER": result.wer}
    return found


def run(folder: Path, begin: G2P, sets: dict[str, data.Lexicon], trained_on: tuple[Any, ...], which: Settings) -> None:
    """One run, to its end and scored; what of it is there already is kept."""
    if (folder / "scores.json").exists():
        return
    train, vocabulary = trained_on
    trainer = Trainer(folder, train, sets["dev"], vocabulary, which)
    spent = folder / "spent.json"  # processor seconds of earlier, interrupted parts
    before = json.loads(spent.read_text()) if spent.exists() else 0.0
    started = time.process_time()

    def note(step: int) -> bool:
        if step % 20 == 0:
            harness.write_json(spent, before + time.process_time() - started)
        return False

    if (folder / "training.pt").exists():
        trainer.resume()
    else:
        trainer.begin_from(begin)
        started = time.process_time()
    trainer.run(stop=note)
    seconds = before + time.process_time() - started
    harness.write_json(folder / "scores.json", {"seconds": seconds, **scores(trainer.average, vocabulary, sets)})


def measure(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    begin, vocabulary = load_model(args.checkpoint)
    train, dev = data.split_dev(data.read_lexicon(data.TRAIN_FILE), data.DEV_WORDS)
    sets = {"dev": dev, "test": data.read_lexicon(data.TEST_FILE)}
    at_first = args.runs / "before.json"
    if not at_first.exists():
        harness.write_json(at_first, scores(begin, vocabulary, sets))
    for seed in args.seeds:
        for way in args.ways:
            which = settings(way, seed, args.rate, args.entropy)
            run(args.runs / f"{way}-{seed}", begin, sets, (train, vocabulary), which)


def collect(args: argparse.Namespace) -> dict[str, Any]:
    """All the runs that have ended."""
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for way in WAYS:
        for path in sorted(args.runs.glob(f"{way}-*/scores.json")):
            runs[way].append({"seed": int(path.parent.name.split("-")[1]), **json.loads(path.read_text())})
    about = harness.about(1, command="python profiling/g2p_risk.py", rate=args.rate, entropy=args.entropy, threads=1)
    return {"about": about, "before": json.loads((args.runs / "before.json").read_text()), "runs": runs}


FIGURES = [
    f"{name}, {how}, {rate}"
    for name in ("dev", "test")
    for how in ("greedy", f"beam {BEAM}")
    for rate in ("PER", "WER")
]


def spread(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):.2f}" + (f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else "")


def page(result: dict[str, Any]) -> str:
    """The table for the example's README: means over the seeds, and the standard deviation of one."""
    before, about = result["before"], result["about"]
    chosen = [name for name in FIGURES if name.startswith("test") or name.endswith("WER")]
    rows = [["before", "", "", *(f"{before[name]:.2f}" for name in chosen)]]
    for way, title in WAYS.items():
        if found := result["runs"][way]:
            minutes = statistics.mean(entry["seconds"] for entry in found) / 60
            rows.append(
                [title, str(len(found)), f"{minutes:.1f}", *(spread([e[name] for e in found]) for name in chosen)]
            )
    return "\n\n".join(
        [
            harness.table(["% of wrong phones or words", "seeds", "minutes", *chosen], rows),
            "Mean ± standard deviation of one run; minutes of the processor. Highest learning rate "
            f"{about['rate']:g} of the first training's; cross entropy beside the risk weighted by "
            f"{about['entropy']:g}. {captions.line(result)} Command: `{about['command']}`.",
        ]
    )


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=RUNS / "full" / "model.pt", help="the model to begin from")
    parser.add_argument("--runs", type=Path, default=RUNS / "versus", help="folder of the runs; %(default)s")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--rate", type=float, default=SIZES["full"].risk_rate, help="of the first training's highest")
    parser.add_argument(
        "--entropy", type=float, default=SIZES["full"].entropy, help="weight of cross entropy in the risk phase"
    )
    parser.add_argument("--report", action="store_true", help="measure nothing: the table from --out")
    parser.add_argument("--out", type=Path, default=harness.results(NAME), help="the file of results, JSON")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    args = arguments(given)
    if not args.report:
        try:
            measure(args)
        except KeyboardInterrupt:
            print(f"stopped; what was done is in {args.runs}, and the same command goes on from there", file=sys.stderr)
            return 130
        harness.write_json(args.out, collect(args))
    text = page(json.loads(args.out.read_text()))
    harness.publish(NAME, args.out.resolve(), None, [(README, "risk-against-entropy", lambda picture: text)])
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
