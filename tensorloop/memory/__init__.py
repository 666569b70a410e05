"""How many bytes a loop keeps for its backward pass, which lines make them, and how they grow with T.

What counts is the *storage*: the allocation behind a tensor. Tensors that share one, views included, count it
once and whole, because any of them keeps all of it alive. Bytes are counted, never sampled, so two runs of
the same code give the same figures.

Every operation passes a dispatch mode, below autograd, which notes the storages it makes by weak reference.
So it does not matter how a storage is held: saved for backward, put on the `ctx` of a custom Function, in a
closure, in a list. Nothing here walks an autograd graph or keeps a tensor alive.

Every result is one line as `repr`, a table as `str`, a page in a notebook; `save(path)` writes it as .png, .html, .json
or .csv, and `plot()` draws it.

Out of sight are bytes that no operation makes: NumPy arrays that never became tensors,
`torch.UntypedStorage(n)`, scratch space inside one kernel, opaque (MKL-DNN) tensors, what other threads make.
"""

from tensorloop.memory.counting.saved import Saved as Saved
from tensorloop.memory.counting.saved import peak as peak
from tensorloop.memory.counting.saved import saved as saved
from tensorloop.memory.counting.saved import saved_bytes as saved_bytes
from tensorloop.memory.counting.sites import Site as Site
from tensorloop.memory.counting.storages import LiveStorages as LiveStorages
from tensorloop.memory.counting.storages import collector_off as collector_off
from tensorloop.memory.process import mark as mark
from tensorloop.memory.process import timeline as timeline
from tensorloop.memory.report.figures import LineGrowth as LineGrowth
from tensorloop.memory.report.growth import Growth as Growth
from tensorloop.memory.report.timeline import Mark as Mark
from tensorloop.memory.report.timeline import Timeline as Timeline
from tensorloop.memory.residuals import Residual as Residual
from tensorloop.memory.residuals import Residuals as Residuals
from tensorloop.memory.residuals import saved_residuals as saved_residuals
from tensorloop.memory.scaling.measure import growth as growth
from tensorloop.memory.tracker import SiteBytes as SiteBytes
from tensorloop.memory.tracker import Tracker as Tracker
from tensorloop.memory.tracker import track as track
