"""The head of a model on a chunk of its hidden states: the forward of the model itself, with what lies below replaced.

Models scale, cap or cut their logits each in a way of its own. So nothing of that is written again here: the forward
runs once for the hidden states, with logits of no token (`logits_to_keep`), and then once for each chunk, in which the
module below the head gives the states of the chunk instead of running.
"""

import dataclasses
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.utils.generic import ModelOutput

from tensorloop.hf.signature import signature_of


class Wanted(NamedTuple):
    """Describes what is asked of the head: (head, its input (M, d), what lists the tensors that it reads) -> (M, k)."""

    places: Tensor  # (M,) of the tokens, among N
    chunk_size: int  # rows of logits; fewer are made in the one call that there is
    score: Callable[..., Tensor]
    router: bool = False  # whether the loss of a router is wanted too

    def of_logits(self, logits: Tensor) -> Tensor:
        """Returns what is wanted of logits (M, V) that are there, (M, k)."""
        return self.score(lambda rows: rows, logits, list)


# Weights of FSDP, tensor parallelism and DeepSpeed are whole within one call of their module: one for all rows, or
# processes whose rows differ in number would wait for each other.
_SHARDED = ("device_mesh", "ds_id", "_unpadded_unsharded_size")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def replace_logits(copied: PreTrainedModel, wanted: Wanted) -> None:
    """Makes the next call of a model, a copy, return what is wanted instead of its logits, (1, M, k).

    It is done within the forward of the model: what wraps it (DDP, FSDP) looks for gradients in what that returns.
    """
    plain, held = vars(copied).get("forward"), weakref.ref(copied)  # a cycle would outlive the graph

    def forward(*args: Any, **options: Any) -> Any:
        model = held()
        assert model is not None
        del vars(model)["forward"]
        if plain is not None:  # another library's, in place of the method
            vars(model)["forward"] = plain
        options |= {"output_router_logits": True} if wanted.router else {}
        places, chunked = wanted.places, len(wanted.places) > wanted.chunk_size and _takes_chunks(model)
        head = _Head.find(model, args, options, places) if chunked else None
        if head is not None:
            found, aux = wanted.score(head, head.states(places), head.read), head.aux
        else:
            keeps = "logits_to_keep" in signature_of(model).names
            out = model.forward(*args, **options, **({"logits_to_keep": places} if keeps else {}))
            logits, aux = out.logits[0], getattr(out, "aux_loss", None)
            found = wanted.of_logits(logits if keeps else logits[places])
        # FSDP hooks into what a forward returns, and warns of views.
        return MoeCausalLMOutputWithPast(logits=torch.stack([found]), aux_loss=aux)  # pyright: ignore[reportArgumentType]

    vars(copied)["forward"] = forward


def _takes_chunks(model: PreTrainedModel) -> bool:
    """Whether the forward takes rows of states apart, as `logits_to_keep` does, and may run as often as one likes."""
    head = model.get_output_embeddings()
    if head is None or "logits_to_keep" not in signature_of(model).names:
        return False
    return not any(hasattr(x, name) for x in head.parameters() for name in _SHARDED)


class _Head:
    """Runs what a model does with hidden states, once the module `below` the head has made them and runs no more."""

    def __init__(self, model: PreTrainedModel, below: nn.Module, out: ModelOutput, args: Any, options: Any) -> None:
        self._model, self._below, self._args, self._options = model, below, args, options
        self._out, self._here = out, threading.local()  # backward may run in a thread for each device
        self.aux: Tensor | None = None
        vars(below).update({name: OrderedDict() for name in _HOOKS})
        vars(below)["forward"] = partial(_give, out, self._here)

    @classmethod
    def find(cls, model: PreTrainedModel, args: Any, options: Any, places: Tensor) -> "_Head | None":
        """Runs a model for its hidden states; None if no module gives them."""
        seen: list[Any] = []

        def note(module: nn.Module, _: Any, out: Any) -> None:
            seen[:] = module, out  # the last is the outermost

        parts = [x for x in model.modules() if isinstance(x, PreTrainedModel) and x is not model]
        hooks = [x.register_forward_hook(note) for x in parts]
        found = model.forward(*args, **options, logits_to_keep=places[:0])
        for hook in hooks:
            hook.remove()
        states = getattr(seen[1], "last_hidden_state", None) if seen else None
        made = isinstance(states, Tensor) and states.dim() == 3 and states.shape[:2] == options["position_ids"].shape
        if not made or not isinstance(seen[1], ModelOutput):
            return None
        options = {name: x for name, x in options.items() if name != "output_router_logits"}
        head = cls(model, seen[0], seen[1], args, options)
        head.aux = getattr(found, "aux_loss", None)
        return head

    def states(self, places: Tensor) -> Tensor:
        """(M, d)"""
        return self._out["last_hidden_state"][0][places]

    def read(self) -> list[Tensor]:
        """The tensors that the head reads, beside the states."""
        inside = set(self._below.modules())
        parts = [x for x in self._model.modules() if x not in inside]
        return [x for part in parts for x in (*part._parameters.values(), *part._buffers.values()) if x is not None]

    def __call__(self, states: Tensor) -> Tensor:
        """Logits (n, V) of states (n, d)."""
        self._here.states = states[None]
        return self._model.forward(*self._args, **self._options).logits[0]


def _give(out: Any, here: Any, *_: Any, **__: Any) -> Any:
    return dataclasses.replace(out, last_hidden_state=here.states)
