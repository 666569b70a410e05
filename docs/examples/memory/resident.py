"""What the whole process takes in three training steps, one after another: `python resident.py timeline.png`."""

import sys

import decoder
import language_model
import torch

from tensorloop.memory import mark, timeline

T = 800


def steps() -> None:
    with mark("language model, tl.scan"):
        language_model.after(T).backward()
    for name, function in (("decoder, TensorArray", decoder.after), ("decoder, torch.cat", decoder.before)):
        with mark(name):
            loss = function(T)
            with mark("its backward"):
                loss.backward()


if __name__ == "__main__":
    torch.set_num_threads(1)
    timeline(steps).save(sys.argv[1])
