"""Speech that a program speaks, tones where it is not installed, and what the model sees of either."""

import math
import random
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import islice
from typing import Any

import torch
from torch import Tensor

import tensorloop as tl

RATE = 22_050  # espeak-ng's, in Hz
WINDOW, HOP = 512, 220  # samples: a frame each 10 ms
MELS = 40
PROGRAM = "espeak-ng"
VOICES = ("en-us", *(f"en-us+{kind}{i}" for kind, n in (("m", 7), ("f", 4)) for i in range(1, n + 1)))


class SoundError(ValueError):
    """What cannot be spoken."""


def has_voice() -> bool:
    return shutil.which(PROGRAM) is not None


def spoken(word: str, draw: random.Random) -> Tensor:
    """(samples,) float32 in -1 ... 1, by a voice, a speed and a pitch that are drawn."""
    manner = ["-v", draw.choice(VOICES), "-s", str(draw.randint(120, 180)), "-p", str(draw.randint(30, 70))]
    try:
        told = subprocess.run([PROGRAM, *manner, "--stdout", "--", word.lower()], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SoundError(f"{PROGRAM} could not speak {word!r}: {error}") from error
    begin = told.stdout.find(b"data") + 8  # behind the chunk's name and its length, which a stream does not know
    if not told.stdout.startswith(b"RIFF") or begin < 8:
        raise SoundError(f"{PROGRAM} gave no WAV file for {word!r}")
    samples = bytearray(told.stdout[begin : begin + (len(told.stdout) - begin) // 2 * 2])
    return torch.frombuffer(samples, dtype=torch.int16).float() / 2**15 if samples else torch.zeros(0)


def toned(labels: Sequence[int], draw: random.Random) -> Tensor:
    """(samples,) float32: two tones for each label, of unequal lengths, with a pause behind each."""
    parts = []
    for label in labels:
        steps = torch.arange(int(RATE * draw.uniform(0.06, 0.12))) / RATE
        low, high = 250 + 90 * (label % 8), 1200 + 350 * (label // 8)
        sound = sum(torch.sin(2 * math.pi * f * draw.uniform(0.98, 1.02) * steps) for f in (low, high))
        parts += [0.3 * sound, torch.zeros(int(RATE * draw.uniform(0.02, 0.05)))]
    return torch.cat(parts) if parts else torch.zeros(0)


def features(audio: tl.PackedTensor) -> tl.PackedTensor:
    """Samples (B, N*) to log-mel frames (B, 1 + N // HOP *, MELS), each row with a mean of 0."""
    spectra = torch.stft(audio, WINDOW, HOP, window=torch.hann_window(WINDOW), return_complex=True)
    logs: Any = (mel_filters() @ spectra.abs().square() + 1e-6).log().transpose(1, 2)
    return logs - logs.mean(1, keepdim=True)


@cache
def mel_filters() -> Tensor:
    """(MELS, frequencies): triangles that lie as far apart as the ear hears them."""
    top = 2595 * math.log10(1 + RATE / 2 / 700)
    corners = 700 * (10 ** (torch.linspace(0, top, MELS + 2) / 2595) - 1)
    heard = torch.linspace(0, RATE / 2, WINDOW // 2 + 1)
    low, middle, high = (corners[i : i + MELS, None] for i in range(3))
    return torch.minimum((heard - low) / (middle - low), (high - heard) / (high - middle)).clamp(min=0)


def frames_of(sounds: Iterable[Tensor], rows: int = 64) -> Iterator[Tensor]:
    """The features of each sound, so many rows at once."""
    while waiting := list(islice(sounds := iter(sounds), rows)):
        yield from features(tl.PackedTensor.from_list(waiting)).unbind()
