"""Every configuration of transformers that can be built small, and what a rollout and a search say of it.

The oracle is the model itself, in float64 and without a cache: one pass over a row's prompt and the tokens that were
found (teacher forcing). A cache of transformers' own is no oracle: where a model sees later tokens, or counts positions
otherwise with a cache, both are wrong alike.

    python -m tests.support.hf_every           # a line for each configuration, then how many there are of each kind
    python -m tests.support.hf_every --write   # and writes which layers are right: tensorloop/hf/certificate.json
"""

import contextlib
import json
import platform
import warnings
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tensorloop import hf
from tensorloop.hf import certificate
from tensorloop.hf.rows import mixers
from tests.support.hf_models import CACHE, VOCABULARY
from tests.support.hf_speech import SPEECH

CLOSE = 1e-4  # norms, rotary angles and routers are float32 in many models; what was found wrong was 0.1 and more
MOST = 40_000_000  # parameters of what is small
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "decoder_vocab_size", "vocab_size_per_layer_input", "src_vocab_size"), VOCABULARY),
    **dict.fromkeys(("tgt_vocab_size", "t2u_vocab_size", "unit_hifi_gan_vocab_size"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "word_embed_proj_dim"), 16),
    **dict.fromkeys(("embed_dim", "d_embed", "output_dim", "projection_dim", "emb_dim", "model_dim"), 16),
    **dict.fromkeys(("intermediate_size", "d_ff", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim"), 24),
    **dict.fromkeys(("dim_ff", "moe_intermediate_size", "shared_intermediate_size", "intermediate_size_mlp"), 24),
    **dict.fromkeys(("shared_expert_intermediate_size", "dense_intermediate_size", "ffn_hidden_size"), 24),
    **dict.fromkeys(("speech_encoder_intermediate_size", "encoder_intermediate_size"), 24),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_encoder_layers", "num_decoder_layers", "speech_encoder_layers", "adaptor_layers"), 2),
    **dict.fromkeys(("encoder_num_hidden_layers", "decoder_num_hidden_layers", "num_hidden_groups", "depth"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "speech_encoder_attention_heads", "num_encoder_attention_heads"), 4),
    **dict.fromkeys(("num_decoder_attention_heads", "encoder_num_attention_heads", "decoder_num_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "encoder_num_key_value_heads"), 2),
    **dict.fromkeys(("decoder_num_key_value_heads", "num_global_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "kv_channels", "global_head_dim", "dim_head", "swa_head_dim"), 4),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "index_head_dim", "rotary_dim"), 4),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "hidden_size_per_layer_input", "laurel_rank"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_target_positions", "n_ctx", "max_seq_len"), 64),
    **dict.fromkeys(("max_source_positions", "max_seq_length", "seq_length"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "moe_top_k", "num_experts_per_token"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("sliding_window", "attention_window_size", "window_size", "attention_chunk_size"), 4),
    **dict.fromkeys(("query_pre_attn_scalar", "index_topk", "num_mel_bins", "input_feat_per_channel"), 4),
    **dict.fromkeys(("dropout", "attention_dropout", "hidden_dropout_prob", "layerdrop", "encoder_layerdrop"), 0.0),
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}


# Of models with layers of several kinds, those that show all of them.
_KINDS: dict[str, dict[str, Any]] = {
    "gemma3n_text": {
        "num_hidden_layers": 4, "num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.0] * 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gemma4_text": {
        "num_hidden_layers": 4, "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "jamba": {"num_hidden_layers": 3, "attn_layer_offset": 1, "attn_layer_period": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "nemotron_h": {"layers_block_type": ["mamba", "moe", "attention"]},
}  # fmt: skip
GROUPS = ("causal", "not causal", "encoder-decoder", "speech")  # the second: the first, where tokens see later ones


class Case(NamedTuple):
    """A model and what it is asked to go on from."""

    name: str
    model: Any
    given: Tensor  # prompts, or what an encoder reads
    mask: Tensor | None


class Answer(NamedTuple):
    """What came of a case: "right", "refused", "wrong", "crash" or "not built", and why."""

    kind: str
    why: str = ""


def small(config: Any, **more: Any) -> Any:
    """A config of this class, small."""
    default = config()
    parts: dict[str, Any] = {}
    for key, kind in (getattr(config, "sub_configs", None) or {}).items():
        part = getattr(default, key, None)
        of = type(part) if part is not None and not isinstance(part, dict) else kind
        if isinstance(of, type) and issubclass(of, transformers.PretrainedConfig) and of.model_type:
            parts[key] = small(of).to_dict()
    names = vars(default).keys() | set(default.attribute_map)
    sizes = {key: x for key, x in _SIZES.items() if key in names}
    layers = next((sizes[key] for key in ("num_hidden_layers", "n_layer", "num_layers") if key in sizes), 2)
    for key, x in vars(default).items():
        if isinstance(x, list) and len(x) > layers and ("layer" in key or key.endswith("pattern")):
            kinds = list(dict.fromkeys(map(str, x)))
            sizes[key] = [*({str(y): y for y in x}[kind] for kind in kinds), *x][:layers]
    if "kv_lora_rank" in names:
        sizes["num_key_value_heads"] = 4
    if "default_language" in names:
        sizes |= {"languages": ("a",), "default_language": "a"}
    if getattr(default, "num_kv_shared_layers", 0):
        sizes["num_kv_shared_layers"] = 0
    return config(**sizes | parts | more)


def names_of(group: str) -> list[str]:
    """The model types of a group."""
    if group == "speech":
        return list(SPEECH)
    pairs = group == "encoder-decoder"
    names = f"MODEL_FOR_{'SEQ_TO_SEQ_CAUSAL_LM' if pairs else 'CAUSAL_LM'}_MAPPING_NAMES"
    return sorted(x for x in getattr(modeling_auto, names) if x in CONFIG_MAPPING)


def seeded(model: Any) -> Any:
    """The model in float64 with preferences, without dropout."""
    model = model.double().eval()
    if getattr(model.config, "_experts_implementation", None) is not None:
        model.set_experts_implementation("eager")  # the others compute in float32
    generator = torch.Generator().manual_seed(1)
    for weight in model.parameters():
        if weight.dim() == 2:
            torch.nn.init.normal_(weight, std=0.3, generator=generator)
    return model


def _small_enough(make: Callable[[], Any]) -> None:
    with torch.device("meta"):
        count = sum(x.numel() for x in make().parameters())
    if count > MOST:
        raise ValueError(f"{count} parameters")


def _causal(config: Any, causal: bool) -> Any:
    """The config with what says whether tokens see later ones set so, as far as it has that."""
    if hasattr(config, "is_decoder"):
        config.is_decoder = causal
    elif not causal and hasattr(config, "use_bidirectional_attention"):
        config.use_bidirectional_attention = True
    elif not causal:
        config.is_causal = False
    return config


def cases(group: str, name: str) -> Iterator[Case]:
    """The cases of a model type: without padding and with; raises where it cannot be built."""
    torch.manual_seed(1)
    if group == "speech":
        make, given, lens = SPEECH[name]()
        model = seeded(make())
        yield Case(name, model, given, None)
        yield Case(name, model, given, torch.arange(max(lens)) < torch.tensor(lens)[:, None])
        return
    config, kind = small(CONFIG_MAPPING[name], **_KINDS.get(name, {})), transformers.AutoModelForSeq2SeqLM
    if group == "encoder-decoder":
        config.decoder_start_token_id = 1
    else:
        kind = transformers.AutoModelForCausalLM
        _causal(config.get_text_config(decoder=True), group == "causal")
    _small_enough(lambda: kind.from_config(config))
    model = seeded(kind.from_config(config))
    ids = torch.randint(3, VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(2))
    if group != "encoder-decoder":
        try:
            model(ids, use_cache=False)
        except RuntimeError:  # some write float64's least number into float32
            model.float()
    yield Case(name, model, ids, None)
    mask = torch.ones_like(ids)
    padded = slice(4, None) if model.config.is_encoder_decoder else slice(0, 2)
    mask[0, padded] = 0
    yield Case(name, model, ids * mask, mask)


@torch.no_grad()
def forced(case: Case, row: int, new: Tensor) -> Tensor:
    """The sum of log-probabilities of new tokens of a row, by one pass of the model over this row."""
    model, given, mask = case.model, case.given[row : row + 1], case.mask
    if model.config.is_encoder_decoder:
        begun = torch.cat([new.new_tensor([1]), new])[None]
        name = model.main_input_name
        if name == "inputs":
            name = "input_values"
        options: dict[str, Any] = {name: given, "decoder_input_ids": begun, "use_cache": False}
        options |= {} if mask is None else {"attention_mask": mask[row : row + 1]}
        logits = model(**options).logits[0, :-1]
    else:
        prompt = given[0] if mask is None else given[0][mask[row].bool()]
        logits = model(torch.cat([prompt, new])[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
    return logits.double().log_softmax(-1).gather(1, new[:, None]).sum()


@torch.no_grad()
def cached(case: Case, row: int, new: Tensor) -> float:
    """The same by steps with a DynamicCache, of a decoder without padding."""
    ids, cache, total = (
        torch.cat([case.given[row], new])[None],
        transformers.DynamicCache(config=case.model.config),
        0.0,
    )
    first = len(case.given[row])
    for start, stop in [(0, first), *((i, i + 1) for i in range(first, ids.shape[1] - 1))]:
        logits = case.model(ids[:, start:stop], use_cache=True, **{CACHE: cache}).logits[0, -1]
        total += float(logits.log_softmax(-1)[ids[0, stop]])
    return total


def _decodes(case: Case) -> bool:
    try:
        cached(case, 0, torch.tensor([3, 4]))
    except Exception:
        return False
    return True


def ask(case: Case, run: str, attention: str | None) -> Answer:
    """What a rollout or a search says of a case, held against teacher forcing of the tokens that it found."""
    model = case.model
    try:
        if attention is not None:
            model.set_attn_implementation(attention)
    except ValueError as error:
        return Answer("refused", str(error)[:90])
    try:
        forced(case, 0, torch.tensor([3, 4, 5]))
    except Exception as error:
        if "tensorloop" in str(error):
            return Answer("refused", str(error)[:140])
        return Answer("not built", f"{type(error).__name__}: {str(error)[:90]}")
    worst, where = 0.0, (0, torch.tensor([3]))
    try:
        if run == "rollout":
            said = hf.rollout(model, case.given, case.mask, max_new_tokens=6, eos_token_id=[])
            pairs = [
                (b, new, x.sum())
                for b, (new, x) in enumerate(zip(said.tokens.unbind(), said.log_probs.unbind(), strict=True))
            ]
        else:
            hyps = hf.beam_search(model, case.given, case.mask, beam_size=3, n_best=2, max_steps=5, eos_token_id=[])
            pairs = [(i // 2, new, hyps.scores.flatten()[i]) for i, new in enumerate(hyps.tokens.unbind())]
        for row, new, score in pairs:
            off = float((score - forced(case, row, new)).abs())
            worst, where = (off, (row, new)) if not off <= worst else (worst, where)
    except (TypeError, ValueError, RuntimeError, NotImplementedError) as error:
        ours = str(error).startswith(("hf.", "TrainCache", "attn_implementation='tensorloop'"))
        if not ours and not model.config.is_encoder_decoder and not _decodes(case):
            return Answer("not built", f"fails with a DynamicCache too: {str(error)[:90]}")
        return Answer("refused" if ours else "crash", f"{type(error).__name__}: {str(error)[:140]}")
    except Exception as error:
        return Answer("crash", f"{type(error).__name__}: {str(error)[:140]}")
    if worst <= (CLOSE if next(model.parameters()).dtype is torch.float64 else 10 * CLOSE):
        return Answer("right", f"{worst:.0e}")
    note = f"off by {worst:.2g}"
    if case.mask is None and not model.config.is_encoder_decoder:
        own = cached(case, *where) - float(forced(case, *where))
        note += f"; DynamicCache is off by {abs(own):.2g}"
    return Answer("wrong", note)


def answers(group: str, name: str) -> dict[str, Answer]:
    """By run, attention and padding."""
    found: dict[str, Answer] = {}
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            made = list(cases(group, name))
        except Exception as error:
            return {"": Answer("not built", f"{type(error).__name__}: {str(error)[:100]}")}
        for case in made:
            own = case.model.config._attn_implementation
            for attention in (own, hf.ATTENTION):
                for run in ("rollout", "search"):
                    padded = "" if case.mask is None else ", padded"
                    found[f"{run}, {attention}{padded}"] = ask(case, run, attention)
            with contextlib.suppress(ValueError):  # a part that has it not
                case.model.set_attn_implementation(own)
    return found


def certified(group: str, name: str) -> dict[str, set[type]]:
    """The kinds of layers that gave what the model itself gives, padded: by "tensorloop", and on packed rows."""
    found: dict[str, set[type]] = {"attention": set(), "mixers": set()}
    try:
        *_, case = cases(group, name)
        report = hf.check_attention(case.model, case.given, case.mask, dtype=None, tolerance=CLOSE)
    except Exception as error:
        print(f"      not certified: {type(error).__name__}: {str(error)[:120]}")
        return found
    kinds = {x.way: x.kind for x in report.checks}
    attention, mixed = certificate.find_readers(case.model)
    asked = [kind for way, kind in kinds.items() if "tensorloop" in way]
    if asked and set(asked) == {"same"}:
        found["attention"] = {type(x) for x in attention}
    if kinds.get("packed rows") == "same":
        found["mixers"] = {type(x) for x in mixed}
    for x in report.checks:
        if x.kind not in ("same", "refused"):
            print(f"      {x.way}: {x.kind}: {x.note[:140]}")
    return found


def write(path: Path, layers: dict[str, set[type]], before: dict[str, Any]) -> None:
    """Writes signatures, each with the names of the classes that have it, and the versions that ran.

    `before`: what is there of models that did not run now.
    """
    made: dict[str, Any] = {}
    for what, kinds in layers.items():
        names: dict[str, list[str]] = {}
        for kind in sorted(kinds, key=lambda x: x.__name__):
            names.setdefault(certificate.signature(kind), []).append(kind.__name__)
        for key, said in before.get(what, {}).items():
            names[key] = sorted({*names.get(key, ()), *said.split()})
        made[what] = {key: " ".join(x) for key, x in sorted(names.items(), key=lambda x: x[1])}
    made["versions"] = {
        "torch": torch.__version__.split("+")[0], "transformers": transformers.__version__,
        "python": platform.python_version(),
    }  # fmt: skip
    path.write_text(json.dumps(made, indent=2) + "\n", "utf-8")


def main(names: list[str], path: Path | None) -> None:
    """Prints a line for each configuration, then the counts."""
    totals: dict[str, Counter[str]] = {}
    layers: dict[str, set[type]] = {"attention": set(), "mixers": set()}
    before = certificate.known() if names else {}
    for group in GROUPS:
        for name in (x for x in names_of(group) if not names or x in names):
            said = answers(group, name)
            kinds = {x.kind for x in said.values()}
            kind = next(x for x in ("wrong", "crash", "right", "refused", "not built") if x in kinds)
            totals.setdefault(group, Counter())[kind] += 1
            why = {where: x for where, x in said.items() if x.kind != "right"}
            print(
                f"{group:16}{name:28}{kind:10}",
                *(f"\n      {k}: {x.kind}: {x.why}" for k, x in why.items()),
                flush=True,
            )
            if path is not None and group != "not causal" and kind != "not built":
                found = _of_speech(name, kinds) if group == "speech" else certified(group, name)
                layers = {key: x | found[key] for key, x in layers.items()}
    for group, count in totals.items():
        print(group, dict(count))
    if path is not None:
        write(path, layers, before)


def _of_speech(name: str, kinds: set[str]) -> dict[str, set[type]]:
    model = next(cases("speech", name)).model
    attention = certificate.find_readers(model)[0] if "right" in kinds and kinds <= {"right", "refused"} else []
    return {"attention": {type(x) for x in attention}, "mixers": set()}


if __name__ == "__main__":
    parser = ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--write", nargs="?", type=Path, const=Path(certificate.__file__).with_suffix(".json"))
    given = parser.parse_args()
    if given.write is not None:
        mixers.is_mixer = lambda kind: True  # what is not known yet is tried
    main(given.names, given.write)
