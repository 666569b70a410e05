"""Modules of SpeechBrain, built small, for the zoo."""

from typing import Any

import torch
from zoo_modules.zoo_check import WIDTH, Batch, Edit, Module
from zoo_modules.zoo_parts import HEADS, HIDDEN, LONG, REFLECTED, channels_first, find, first, made

OF_ROWS = Edit(
    "speechbrain.lobes.models.ECAPA_TDNN.AttentiveStatisticsPooling.forward",
    (
        (
            "mask = length_to_mask(lengths * L, max_len=L, device=x.device)",
            "mask = length_to_mask(x.lens, max_len=x.max_len, device=x.device)",
        ),
    ),
)
OWN_LENGTHS = Edit(
    "speechbrain.nnet.RNN.pack_padded_sequence",
    (("lengths = (lengths * inputs.size(1)).cpu()", "lengths = inputs.lens.cpu()"),),
)


package = "speechbrain"
lobes, nnet = "speechbrain.lobes.models", "speechbrain.nnet"
blocks = f"{lobes}.transformer"
conformer: dict[str, Any] = {"num_layers": 2, "d_model": WIDTH, "d_ffn": HIDDEN, "nhead": HEADS, "kernel_size": 3}


def relative(module: Any, batch: Batch) -> Any:
    return module(batch.x, pos_embs=_table(batch))[0]


def _table(batch: Batch) -> Any:
    return find(f"{nnet}.attention.RelPosEncXL")(WIDTH)(batch.x)


def decode(module: Any, batch: Batch) -> Any:
    return module(batch.x, batch.x * 0.5, tgt_mask=batch.causal)[0]


transformer: dict[str, Any] = {"num_layers": 2, "nhead": HEADS, "d_ffn": HIDDEN, "d_model": WIDTH}
regular = {**conformer, "attention_type": "regularMHA"}
MODULES = [
    Module(package, "TransformerEncoder", made(f"{blocks}.Transformer.TransformerEncoder", **transformer), first),
    Module(
        package,
        "TransformerEncoder, norm first, 1dcnn",
        made(f"{blocks}.Transformer.TransformerEncoder", **transformer, normalize_before=True, ffn_type="1dcnn"),
        first,
        lens=REFLECTED,
    ),
    Module(
        package,
        "TransformerEncoder, padding mask",
        made(f"{blocks}.Transformer.TransformerEncoder", **transformer),
        lambda m, b: m(b.x, src_key_padding_mask=b.padding)[0],
    ),
    Module(
        package,
        "TransformerDecoder, causal",
        made(f"{blocks}.Transformer.TransformerDecoder", **transformer),
        decode,
    ),
    Module(
        package,
        "PositionalEncoding",
        made(f"{blocks}.Transformer.PositionalEncoding", WIDTH),
        lambda m, b: b.x + m(b.x),
    ),
    Module(
        package,
        "ConformerEncoder, RelPosMHAXL",
        made(f"{blocks}.Conformer.ConformerEncoder", **conformer),
        relative,
        dtype=torch.float32,
    ),
    Module(package, "ConformerEncoder, regularMHA", made(f"{blocks}.Conformer.ConformerEncoder", **regular), first),
    Module(
        package,
        "ConformerEncoder, causal",
        made(f"{blocks}.Conformer.ConformerEncoder", **regular, causal=True),
        lambda m, b: m(b.x, src_mask=b.causal)[0],
    ),
    Module(package, "Conformer's ConvolutionModule", made(f"{blocks}.Conformer.ConvolutionModule", WIDTH, 3)),
    Module(
        package,
        "BranchformerEncoder, regularMHA",
        made(
            f"{blocks}.Branchformer.BranchformerEncoder",
            2,
            WIDTH,
            HEADS,
            3,
            attention_type="regularMHA",
            csgu_linear_units=HIDDEN,
        ),
        first,
        lens=REFLECTED,
    ),
    Module(
        package,
        "CRDNN",
        lambda: find(f"{lobes}.CRDNN.CRDNN")(
            input_shape=[None, None, WIDTH],
            dropout=0.0,
            cnn_blocks=1,
            cnn_channels=[2],
            rnn_layers=1,
            rnn_neurons=5,
            rnn_class=find(f"{nnet}.RNN.LSTM"),
            rnn_bidirectional=True,
            dnn_blocks=1,
            dnn_neurons=6,
        ),
        lens=REFLECTED,
        train=False,
    ),
    Module(
        package,
        "ECAPA_TDNN",
        made(
            f"{lobes}.ECAPA_TDNN.ECAPA_TDNN",
            WIDTH,
            lin_neurons=5,
            channels=[8, 8, 16],
            kernel_sizes=[3, 3, 1],
            dilations=[1, 2, 1],
            groups=[1, 1, 1],
            attention_channels=4,
            res2net_scale=2,
            se_channels=4,
        ),
        train=False,
        lens=LONG,
        edits=(OF_ROWS,),
    ),
    Module(
        package,
        "ECAPA's SERes2NetBlock",
        made(f"{lobes}.ECAPA_TDNN.SERes2NetBlock", WIDTH, WIDTH, 2, 4, 3, 1),
        channels_first,
        REFLECTED,
        train=False,
    ),
    Module(package, "LSTM", made(f"{nnet}.RNN.LSTM", 5, input_size=WIDTH, num_layers=2, bidirectional=True), first),
    Module(
        package,
        "LSTM by lengths",
        made(f"{nnet}.RNN.LSTM", 5, input_size=WIDTH),
        lambda m, b: (m(b.x, lengths=b.lens / b.lens.max())[0], b.lens),
        (12, 9, 7, 1),
        edits=(OWN_LENGTHS,),
    ),
    Module(package, "LiGRU", made(f"{nnet}.RNN.LiGRU", 5, [None, None, WIDTH], normalization="layernorm"), first),
    Module(package, "Conv1d", made(f"{nnet}.CNN.Conv1d", 6, 3, in_channels=WIDTH), lens=LONG),
    Module(package, "Conv1d, causal", made(f"{nnet}.CNN.Conv1d", 6, 3, in_channels=WIDTH, padding="causal")),
    Module(
        package,
        "ContextNetBlock",
        made(f"{lobes}.ContextNet.ContextNetBlock", WIDTH, 3, 2, 4, [None, None, WIDTH], dropout=0.0),
        train=False,
        lens=REFLECTED,
    ),
]
