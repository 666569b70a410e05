"""Training: cross entropy, then minimum risk. AdamW, a learning-rate cycle each, averaged weights, a stop at any time.

The risk phase (``risk.py``) begins from the averaged weights of the phase before it, with an optimizer of its own.
"""

import math
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from docs.examples.g2p import checkpoint, processes
from docs.examples.g2p.data import Examples, Lexicon, Vocabulary
from docs.examples.g2p.model import G2P, Config, Masks
from docs.examples.g2p.risk import losses
from docs.examples.g2p.scoring import pronounce, score


@dataclass(frozen=True)
class Settings:
    """Everything that decides what a run computes, but for the data, a model to begin from, and the threads."""

    epochs: int = 28
    batch_size: int = 256
    hidden: int = 320
    embed: int = 128
    dropout: float = 0.3
    label_smoothing: float = 0.1
    learning_rate: float = 3e-3
    warmup: float = 0.1  # share of all steps
    weight_decay: float = 0.01
    clip: float = 2.0  # the gradient's norm
    average: float = 0.998  # decay of the averaged weights, a step
    seed: int = 0
    backwards: bool = False  # from the last phone to the first
    risk_epochs: int = 0  # after the others
    risk_rate: float = 0.1  # the learning rate of that phase, as a share of the other
    beam: int = 4
    alpha: float = 1.0  # sharpness of the risk's probabilities
    entropy: float = 0.1  # the weight of cross entropy beside the risk
    per_phone: bool = False  # edits divided by the phones of the word
    compile: bool = False  # the decoder's loop in the first phase: a fifth less time, after half a minute of compiling


def one_cycle(step: int, steps: int, peak: float, warmup: float) -> float:
    """The learning rate of a step: up in a straight line, down to zero in half a cosine (Smith & Topin)."""
    rising = max(1, round(warmup * steps))
    if step < rising:
        return peak * (step + 1) / rising
    return peak * 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, steps - rising)))


class _Called(nn.Module):
    """Calls a function with the model: what DistributedDataParallel can wrap, whatever the loss is made of."""

    def __init__(self, model: G2P) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(self.model, *arguments)


class Trainer:
    """A run in a folder: ``training.pt`` to go on from, ``model.pt`` the best model, ``history.json``.

    Where there is a risk phase, ``before_risk.pt`` is the model that it began from.

    All that a later step depends on is in ``state()``: weights, averaged weights, optimizer, random generator,
    and the position in the run. A run that is stopped and resumed gives the same numbers, on the same number of
    threads, as one that was not.

    Several processes (``processes``) share each batch: they hold the same weights, draw the same random numbers and
    give the same losses, to rounding, as one process. The first of them writes the files.
    """

    def __init__(self, folder: str | Path, train: Lexicon, dev: Lexicon, vocabulary: Vocabulary, settings: Settings):
        self.folder, self.dev, self.vocabulary, self.settings = Path(folder), dev, vocabulary, settings
        self.examples = Examples(train, vocabulary, settings.backwards)
        torch.manual_seed(settings.seed)
        sizes = (len(vocabulary.letters), len(vocabulary.phones), settings.embed, settings.hidden)
        self.model = G2P(Config(*sizes, settings.dropout, settings.backwards))
        self.average = deepcopy(self.model).eval().requires_grad_(False)
        called = _Called(self.model)
        self.forward = called if processes.world() == 1 else DistributedDataParallel(called)
        self.optimizer = self._new_optimizer()
        self.steps_per_epoch = math.ceil(len(self.examples) / settings.batch_size)
        self.step = 0
        self.loss_sum = self.risk_sum = 0.0  # over the batches of the current epoch
        self.seconds = 0.0
        self.history: list[dict[str, float]] = []

    def _new_optimizer(self) -> torch.optim.Optimizer:
        rate, decay = self.settings.learning_rate, self.settings.weight_decay
        return torch.optim.AdamW(self.model.parameters(), lr=rate, weight_decay=decay, fused=True)

    @property
    def risk_begins(self) -> int:
        """The first step of the risk phase."""
        return self.settings.epochs * self.steps_per_epoch

    def begin_from(self, model: G2P) -> None:
        """Take the weights of a trained model of the same sizes, before the first step; its scores are epoch 0."""
        self._take(model)
        self._note({"epoch": 0}, time.monotonic())

    def _take(self, model: G2P) -> None:
        for mine in (self.model, self.average):
            mine.load_state_dict(model.state_dict())

    def run(self, save_every: float = 60.0, stop: Callable[[int], bool] = lambda step: False) -> bool:
        """Train to the end; True if it was reached. Saves every ``save_every`` seconds and after each epoch.

        ``stop(step)`` is asked before every step; True saves and returns False.
        """
        for epoch in range(self.step // self.steps_per_epoch, self.settings.epochs + self.settings.risk_epochs):
            if self.step == self.risk_begins:
                self._begin_risk()
            if not self._epoch(epoch, save_every, stop):
                self.save()
                return False
        return True

    def _epoch(self, epoch: int, save_every: float, stop: Callable[[int], bool]) -> bool:
        done = self.step - epoch * self.steps_per_epoch
        order = self.examples.order(self.settings.batch_size, seed=self.settings.seed * 1_000_003 + epoch)
        started = saved = time.monotonic()
        self.model.train()
        epochs = self.settings.epochs + self.settings.risk_epochs
        title, silent = f"epoch {epoch + 1}/{epochs}", not processes.is_first()
        with tqdm(total=len(order), initial=done, desc=title, disable=silent) as bar:
            for indices in order[done:]:
                if stop(self.step):
                    self.seconds += time.monotonic() - started
                    return False
                shown = self._train_on(indices)
                bar.update()
                bar.set_postfix({what: f"{value:.3f}" for what, value in shown.items()}, refresh=False)
                now = time.monotonic()
                if now - saved > save_every:
                    self.seconds, started, saved = self.seconds + now - started, now, now
                    self.save()
        self._finish_epoch(epoch, started)
        return True

    def _begin_risk(self) -> None:
        # Nothing here depends on the generator or on a step, so that it may be done again after a stop.
        self._take(self.average)
        self.optimizer = self._new_optimizer()
        if processes.is_first():
            checkpoint.save_model(self.folder / "before_risk.pt", self.average, self.vocabulary)

    def _rate(self) -> float:
        settings, step = self.settings, self.step - self.risk_begins
        if step < 0:
            return one_cycle(self.step, self.risk_begins, settings.learning_rate, settings.warmup)
        steps, peak = settings.risk_epochs * self.steps_per_epoch, settings.risk_rate * settings.learning_rate
        return one_cycle(step, steps, peak, settings.warmup)

    def _train_on(self, indices: Tensor) -> dict[str, float]:
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate()
        in_risk = self.step >= self.risk_begins
        part, risk = self._parts_of_losses(indices, self._risk if in_risk else self._entropy)
        loss, risk = processes.total(torch.stack((part.detach(), risk))).tolist()
        if not math.isfinite(loss):
            raise FloatingPointError(f"train: the loss of step {self.step} is {loss}; lower the learning rate")
        self.optimizer.zero_grad()
        (part * processes.world()).backward()  # the processes' gradients are averaged, their losses added
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        self.optimizer.step()
        self._average_weights()
        self.step += 1
        self.loss_sum, self.risk_sum = self.loss_sum + loss, self.risk_sum + risk
        return {"risk": risk} if in_risk else {"loss": loss}

    def _parts_of_losses(
        self, indices: Tensor, objective: Callable[[Tensor, Tensor, Masks], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """What this process' rows add to the mean loss of the batch, and to its mean risk."""
        mine = list(range(processes.rank(), len(indices), processes.world()))
        counts = float(bool(mine))
        mine = mine or [0]  # more processes than rows: DDP needs a loss of each, and this one counts for nothing
        # Masks for the whole batch, so that every process moves its generator as one process would.
        masks = self.model.masks(len(indices)).of_rows(mine)
        loss, risk = objective(indices, indices[mine], masks)
        return counts * loss, counts * risk

    def _entropy(self, batch: Tensor, rows: Tensor, masks: Masks) -> tuple[Tensor, Tensor]:
        letters, phones = self.examples.batch(rows)
        scores = self.forward(G2P.__call__, letters, phones, masks, self.settings.compile)
        share = len(phones.values) / self.examples.phones(batch)
        loss = share * F.cross_entropy(scores.values, phones.values, label_smoothing=self.settings.label_smoothing)
        return loss, torch.zeros_like(loss)

    def _risk(self, batch: Tensor, rows: Tensor, masks: Masks) -> tuple[Tensor, Tensor]:
        letters, _ = self.examples.batch(rows)
        gold, references = self.examples.gold(rows), self.examples.references(rows)
        settings = self.settings
        options = (settings.beam, settings.alpha, settings.per_phone)
        found = self.forward(losses, letters, gold, references, masks, *options)
        risk = found.risk / len(batch)
        return risk + settings.entropy * found.entropy / self.examples.phones(batch), risk.detach()

    @torch.no_grad()
    def _average_weights(self) -> None:
        # At the start of a phase over a shorter past: what the phase began with is soon forgotten.
        done = self.step if self.step < self.risk_begins else self.step - self.risk_begins
        decay = min(self.settings.average, (1 + done) / (10 + done))
        for mean, weight in zip(self.average.parameters(), self.model.parameters(), strict=True):
            mean.lerp_(weight, 1 - decay)

    def _finish_epoch(self, epoch: int, started: float) -> None:
        entry = {"epoch": epoch + 1, "loss": self.loss_sum / self.steps_per_epoch}
        if self.step > self.risk_begins:
            entry["risk"] = self.risk_sum / self.steps_per_epoch
        self.loss_sum = self.risk_sum = 0.0
        self._note(entry, started)

    def _note(self, entry: dict[str, float], started: float) -> None:
        """Score the averaged weights, and keep them where they are the best; an entry of the history."""
        words = list(self.dev)[processes.rank() :: processes.world()]
        parts = processes.gathered(pronounce(self.average, self.vocabulary, words))
        result = score({word: phones for part in parts for word, phones in part.items()}, self.dev)
        self.seconds += time.monotonic() - started
        entry |= {"dev_per": result.per, "dev_wer": result.wer, "seconds": self.seconds}
        best = entry["dev_wer"] < min((past["dev_wer"] for past in self.history), default=math.inf)
        if best and processes.is_first():
            checkpoint.save_model(self.folder / "model.pt", self.average, self.vocabulary)
        self.history.append(entry)
        self.save()
        if processes.is_first():
            figures = "  ".join(f"{what} {entry[what]:.4f}" for what in ("loss", "risk") if what in entry)
            rates = "dev PER {dev_per:.2f} %  WER {dev_wer:.2f} %".format(**entry)
            tqdm.write(f"epoch {entry['epoch']}: {figures}{'  ' if figures else ''}{rates}")

    def state(self) -> dict[str, Any]:
        """Everything that later steps depend on, as tensors and plain values."""
        return {
            **checkpoint.describe(self.model, self.vocabulary),
            "settings": asdict(self.settings),
            "examples": len(self.examples),
            "weights": self.model.state_dict(),
            "average": self.average.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "random": torch.get_rng_state(),
            "step": self.step,
            "loss_sum": self.loss_sum,
            "risk_sum": self.risk_sum,
            "seconds": self.seconds,
            "history": self.history,
        }

    def save(self) -> None:
        """Write ``training.pt`` and ``history.json``, each whole or not at all; the first process does."""
        if not processes.is_first():
            return
        checkpoint.save(self.folder / "training.pt", checkpoint.TRAINING_FORMAT, self.state())
        self._write_history()

    def _write_history(self) -> None:
        record = {"settings": asdict(self.settings), "examples": len(self.examples), "epochs": self.history}
        checkpoint.write_json(self.folder / "history.json", record)

    def resume(self) -> None:
        """Go on from ``training.pt``. Raises CheckpointError if it is missing, damaged or of another run.

        Refused before anything is changed. ``history.json`` is written anew: a run that was killed between the two
        files has it an epoch behind.
        """
        path = self.folder / "training.pt"
        state = checkpoint.load(path, checkpoint.TRAINING_FORMAT)
        with checkpoint.unfit(path, "this run"):
            self._refuse_another_run(path, state)
            self._refuse_damaged(path, state)
            torch.set_rng_state(state["random"])  # refuses what is no state
            self.model.load_state_dict(state["weights"])
            self.average.load_state_dict(state["average"])
            self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds, self.history = state["step"], state["seconds"], state["history"]
        self.loss_sum, self.risk_sum = state["loss_sum"], state["risk_sum"]
        if processes.is_first():
            self._write_history()

    def _refuse_another_run(self, path: Path, state: dict[str, Any]) -> None:
        ours = self.state()
        for key in ("config", "vocabulary", "settings", "examples"):
            if state[key] != ours[key]:
                raise checkpoint.CheckpointError(
                    f"{path}: was made with other {key} ({_difference(state[key], ours[key])}); "
                    "resume with the options of the first run"
                )

    def _refuse_damaged(self, path: Path, state: dict[str, Any]) -> None:
        steps = (self.settings.epochs + self.settings.risk_epochs) * self.steps_per_epoch
        _refuse_number(path, "step", state["step"], steps, int)
        for name in ("loss_sum", "risk_sum", "seconds"):
            _refuse_number(path, name, state[name])
        for i, entry in enumerate(state["history"]):
            for name in {"epoch", "dev_per", "dev_wer", "seconds", *entry}:
                _refuse_number(path, f"history[{i}][{name!r}]", entry[name])
        checkpoint.check_weights(path, "weights", state["weights"], self.model.state_dict())
        checkpoint.check_weights(path, "average", state["average"], self.average.state_dict())
        self._refuse_optimizer(path, state["optimizer"])

    def _refuse_optimizer(self, path: Path, found: dict[str, Any]) -> None:
        """Raises where the optimizer's options are not those of this run, or its averages not of these weights."""
        options, theirs = (
            [{name: value for name, value in group.items() if name != "lr"} for group in groups]
            for groups in (self.optimizer.state_dict()["param_groups"], found["param_groups"])
        )
        if options != theirs:
            raise checkpoint.CheckpointError(f"{path}: was made with another optimizer")
        weights = list(self.model.parameters())
        for i, weight in enumerate(weights) if found["state"] else ():  # before the first step there is none
            for name, like in (("step", torch.zeros(())), ("exp_avg", weight), ("exp_avg_sq", weight)):
                checkpoint.check_tensor(path, f"optimizer[{i}][{name!r}]", found["state"][i][name], like)


def _refuse_number(path: Path, name: str, found: Any, most: float = math.inf, kind: type | None = None) -> None:
    """Raises CheckpointError for what is no number from 0 to ``most``."""
    right = type(found) is kind if kind else isinstance(found, int | float)
    if not right or not 0 <= found <= most or not math.isfinite(found):
        what = f"from 0 to {most}" if most < math.inf else "of 0 or more"
        number = "a whole number" if kind is int else "a number"
        shown = repr(found) if isinstance(found, int | float | str) else f"a {type(found).__name__}"
        raise checkpoint.CheckpointError(f"{path}: its {name} must be {number} {what}, found {shown:.80}")


def _difference(saved: Any, ours: Any) -> str:
    if not (isinstance(saved, dict) and isinstance(ours, dict)):
        return f"then {saved}, now {ours}"
    return ", ".join(f"{k}: then {saved.get(k)}, now {ours.get(k)}" for k in ours if saved.get(k) != ours.get(k))
