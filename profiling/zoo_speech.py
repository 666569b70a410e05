"""Modules of ESPnet and SpeechBrain, built small: the other half of the zoo."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from zoo_check import WIDTH, Batch, Edit, Module
from zoo_modules import HEADS, HIDDEN, find, first

LONG = (17, 32, 9, 24)  # which subsampling leaves something of
REFLECTED = (7, 12, 3, 9)  # rows that are reflected at their ends are longer than what is added
SHORT = "rows below the kernel's length are refused by the module's own check"
ENCODER: dict[str, Any] = {
    "output_size": WIDTH,
    "attention_heads": HEADS,
    "num_blocks": 2,
    "dropout_rate": 0.0,
    "positional_dropout_rate": 0.0,
    "attention_dropout_rate": 0.0,
    "input_layer": "linear",
}

_EMBEDDING = "espnet.nets.pytorch_backend.transformer.embedding.RelPositionalEncoding"
OF_THE_LONGEST = (
    Edit(
        f"{_EMBEDDING}.extend_pe",
        (("if self.pe.size(1) >= x.size(1) * 2 - 1:", "if self.pe.size(1) >= x.max_len * 2 - 1:"),),
    ),
    Edit(
        f"{_EMBEDDING}.forward",
        (
            (
                "self.pe.size(1) // 2 - x.size(1) + 1 : self.pe.size(1) // 2 + x.size(1),",
                "self.pe.size(1) // 2 - x.max_len + 1 : self.pe.size(1) // 2 + x.max_len,",
            ),
        ),
    ),
)
MEMORY_MASK = Edit(
    "espnet2.asr.decoder.transformer_decoder.BaseTransformerDecoder.forward",
    (
        (
            "memory_mask = (~make_pad_mask(hlens, maxlen=memory.size(1)))[:, None, :].to(",
            "memory_mask = (~make_pad_mask(hlens, maxlen=memory.max_len))[:, None, :].to(",
        ),
    ),
)
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


def _made(path: str, *args: Any, **options: Any) -> Callable[[], nn.Module]:
    return lambda: find(path)(*args, **options)


def _of_espnet() -> list[Module]:
    old, new = "espnet.nets.pytorch_backend", "espnet2"
    package = "espnet"
    block = {"linear_units": HIDDEN}
    conformer = {**ENCODER, **block, "cnn_module_kernel": 3, "macaron_style": True}
    mlp = {"cgmlp_linear_units": HIDDEN, "cgmlp_conv_kernel": 3}
    absolute = {"pos_enc_layer_type": "abs_pos", "selfattention_layer_type": "selfattn"}

    def attend(module: Any, batch: Batch) -> Any:
        return module(batch.x, batch.x, batch.x, (~batch.padding)[:, None])

    def attend_to_all(module: Any, batch: Batch) -> Any:
        return module(batch.x, batch.x, batch.x, None)

    def layer(module: Any, batch: Batch) -> Any:
        return module(batch.x, (~batch.padding)[:, None])[0]

    def encode(module: Any, batch: Batch) -> Any:
        return module(batch.x, batch.lens)[0]

    def make_layer() -> nn.Module:
        attention = find(f"{old}.transformer.attention.MultiHeadedAttention")(HEADS, WIDTH, 0.0)
        mlp = find(f"{old}.transformer.positionwise_feed_forward.PositionwiseFeedForward")(WIDTH, HIDDEN, 0.0)
        return find(f"{old}.transformer.encoder_layer.EncoderLayer")(WIDTH, attention, mlp, 0.0)

    def decode(module: Any, batch: Batch) -> Any:
        ids = (batch.x[..., 0] * 4).long().abs() % 11
        return module(batch.x, batch.lens, ids, batch.lens)[0]

    def relative() -> nn.Module:
        class Attention(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.places = find(f"{old}.transformer.embedding.RelPositionalEncoding")(WIDTH, 0.0)
                self.attention = find(f"{old}.transformer.attention.RelPositionMultiHeadedAttention")(HEADS, WIDTH, 0.0)

            def forward(self, x: Any) -> Any:
                x, places = self.places(x)
                return self.attention(x, x, x, places, None)

        return Attention()

    subsampled = {"lens": LONG, "note": SHORT}
    rows = f"{old}.transformer"
    return [
        Module(
            package,
            "MultiHeadedAttention, padding mask",
            _made(f"{rows}.attention.MultiHeadedAttention", HEADS, WIDTH, 0.0),
            attend,
        ),
        Module(
            package,
            "MultiHeadedAttention by SDPA",
            _made(f"{rows}.attention.MultiHeadedAttention", HEADS, WIDTH, 0.0, use_sdpa=True),
            attend,
        ),
        Module(
            package,
            "MultiHeadedAttention, no mask",
            _made(f"{rows}.attention.MultiHeadedAttention", HEADS, WIDTH, 0.0, qk_norm=True),
            attend_to_all,
        ),
        Module(package, "RelPositionMultiHeadedAttention", relative, edits=OF_THE_LONGEST),
        Module(package, "PositionalEncoding", _made(f"{rows}.embedding.PositionalEncoding", WIDTH, 0.0)),
        Module(package, "ScaledPositionalEncoding", _made(f"{rows}.embedding.ScaledPositionalEncoding", WIDTH, 0.0)),
        Module(package, "EncoderLayer", make_layer, layer),
        Module(
            package,
            "TransformerEncoder",
            _made(f"{new}.asr.encoder.transformer_encoder.TransformerEncoder", WIDTH, **ENCODER, **block),
            encode,
        ),
        Module(
            package,
            "TransformerEncoder, Conv2dSubsampling",
            _made(
                f"{new}.asr.encoder.transformer_encoder.TransformerEncoder",
                WIDTH,
                **{**ENCODER, "input_layer": "conv2d"},
                **block,
            ),
            encode,
            **subsampled,
        ),
        Module(
            package,
            "ConformerEncoder, absolute positions",
            _made(f"{new}.asr.encoder.conformer_encoder.ConformerEncoder", WIDTH, **conformer, **absolute),
            encode,
            train=False,
        ),
        Module(
            package,
            "ConformerEncoder",
            _made(f"{new}.asr.encoder.conformer_encoder.ConformerEncoder", WIDTH, **conformer, rel_pos_type="latest"),
            encode,
            train=False,
            edits=OF_THE_LONGEST,
        ),
        Module(
            package, "ConvolutionModule", _made(f"{old}.conformer.convolution.ConvolutionModule", WIDTH, 3), train=False
        ),
        Module(
            package,
            "BranchformerEncoder",
            _made(f"{new}.asr.encoder.branchformer_encoder.BranchformerEncoder", WIDTH, **ENCODER, **mlp),
            encode,
            edits=OF_THE_LONGEST,
        ),
        Module(
            package,
            "BranchformerEncoder, absolute positions",
            _made(
                f"{new}.asr.encoder.branchformer_encoder.BranchformerEncoder",
                WIDTH,
                **ENCODER,
                **mlp,
                pos_enc_layer_type="abs_pos",
                attention_layer_type="selfattn",
            ),
            encode,
        ),
        Module(
            package,
            "EBranchformerEncoder",
            _made(f"{new}.asr.encoder.e_branchformer_encoder.EBranchformerEncoder", WIDTH, **ENCODER, **mlp, **block),
            encode,
            edits=OF_THE_LONGEST,
        ),
        Module(
            package,
            "EBranchformerEncoder, absolute positions",
            _made(
                f"{new}.asr.encoder.e_branchformer_encoder.EBranchformerEncoder",
                WIDTH,
                **ENCODER,
                **mlp,
                **block,
                pos_enc_layer_type="abs_pos",
                attention_layer_type="selfattn",
            ),
            encode,
        ),
        Module(
            package,
            "Conv2dSubsampling",
            _made(f"{rows}.subsampling.Conv2dSubsampling", WIDTH, WIDTH, 0.0),
            lambda m, b: m(b.x, None)[0],
            LONG,
        ),
        Module(
            package,
            "Conv1dSubsampling2",
            _made(f"{rows}.subsampling.Conv1dSubsampling2", WIDTH, WIDTH, 0.0),
            lambda m, b: m(b.x, None)[0],
            LONG,
        ),
        Module(
            package,
            "TransformerDecoder",
            _made(f"{new}.asr.decoder.transformer_decoder.TransformerDecoder", 11, WIDTH, HEADS, HIDDEN, 1, 0.0, 0.0),
            decode,
            edits=(MEMORY_MASK,),
        ),
        Module(
            package,
            "RNNEncoder",
            _made(
                f"{new}.asr.encoder.rnn_encoder.RNNEncoder",
                WIDTH,
                num_layers=1,
                hidden_size=6,
                output_size=5,
                subsample=None,
            ),
            lambda m, b: m(b.x, b.lens)[:2],
            (12, 9, 7, 1),
        ),
        Module(
            package,
            "DurationPredictor",
            _made(f"{old}.fastspeech.duration_predictor.DurationPredictor", WIDTH, 2, 6, 3, 0.0),
        ),
        Module(
            package,
            "VariancePredictor",
            _made(f"{new}.tts.fastspeech2.variance_predictor.VariancePredictor", WIDTH, 2, 6, 3, True, 0.0),
        ),
        Module(
            package,
            "Tacotron2's Encoder",
            _made(f"{old}.tacotron2.encoder.Encoder", 11, "embed", WIDTH, 1, 6, 2, 6, 3, dropout_rate=0.0),
            lambda m, b: m(b.x, b.lens),
            (12, 9, 7, 1),
            classes=11,
            train=False,
        ),
        Module(
            package,
            "EcapaTdnnEncoder",
            _made(f"{new}.spk.encoder.ecapa_tdnn_encoder.EcapaTdnnEncoder", WIDTH, "EcapaBlock", 2, 8, 6),
            channels_last_ecapa,
            train=False,
        ),
        Module(
            package,
            "ChnAttnStatPooling",
            _made(f"{new}.spk.pooling.chn_attn_stat_pooling.ChnAttnStatPooling", WIDTH),
            lambda m, b: m(b.x.transpose(1, 2)),
            train=False,
        ),
    ]


def channels_first(module: Any, batch: Batch) -> Any:
    """Of (B, C, T*), turned on both sides."""
    return module(batch.x.transpose(1, 2)).transpose(1, 2)


def channels_last_ecapa(module: Any, batch: Batch) -> Any:
    """(B, C, T*) as its pooling takes it, turned."""
    return module(batch.x).transpose(1, 2)


def _of_speechbrain() -> list[Module]:
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
    return [
        Module(package, "TransformerEncoder", _made(f"{blocks}.Transformer.TransformerEncoder", **transformer), first),
        Module(
            package,
            "TransformerEncoder, norm first, 1dcnn",
            _made(f"{blocks}.Transformer.TransformerEncoder", **transformer, normalize_before=True, ffn_type="1dcnn"),
            first,
            lens=REFLECTED,
        ),
        Module(
            package,
            "TransformerEncoder, padding mask",
            _made(f"{blocks}.Transformer.TransformerEncoder", **transformer),
            lambda m, b: m(b.x, src_key_padding_mask=b.padding)[0],
        ),
        Module(
            package,
            "TransformerDecoder, causal",
            _made(f"{blocks}.Transformer.TransformerDecoder", **transformer),
            decode,
        ),
        Module(
            package,
            "PositionalEncoding",
            _made(f"{blocks}.Transformer.PositionalEncoding", WIDTH),
            lambda m, b: b.x + m(b.x),
        ),
        Module(
            package,
            "ConformerEncoder, RelPosMHAXL",
            _made(f"{blocks}.Conformer.ConformerEncoder", **conformer),
            relative,
            dtype=torch.float32,
        ),
        Module(
            package, "ConformerEncoder, regularMHA", _made(f"{blocks}.Conformer.ConformerEncoder", **regular), first
        ),
        Module(
            package,
            "ConformerEncoder, causal",
            _made(f"{blocks}.Conformer.ConformerEncoder", **regular, causal=True),
            lambda m, b: m(b.x, src_mask=b.causal)[0],
        ),
        Module(package, "Conformer's ConvolutionModule", _made(f"{blocks}.Conformer.ConvolutionModule", WIDTH, 3)),
        Module(
            package,
            "BranchformerEncoder, regularMHA",
            _made(
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
            _made(
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
            _made(f"{lobes}.ECAPA_TDNN.SERes2NetBlock", WIDTH, WIDTH, 2, 4, 3, 1),
            channels_first,
            REFLECTED,
            train=False,
        ),
        Module(
            package, "LSTM", _made(f"{nnet}.RNN.LSTM", 5, input_size=WIDTH, num_layers=2, bidirectional=True), first
        ),
        Module(
            package,
            "LSTM by lengths",
            _made(f"{nnet}.RNN.LSTM", 5, input_size=WIDTH),
            lambda m, b: (m(b.x, lengths=b.lens / b.lens.max())[0], b.lens),
            (12, 9, 7, 1),
            edits=(OWN_LENGTHS,),
        ),
        Module(package, "LiGRU", _made(f"{nnet}.RNN.LiGRU", 5, [None, None, WIDTH], normalization="layernorm"), first),
        Module(package, "Conv1d", _made(f"{nnet}.CNN.Conv1d", 6, 3, in_channels=WIDTH), lens=LONG),
        Module(package, "Conv1d, causal", _made(f"{nnet}.CNN.Conv1d", 6, 3, in_channels=WIDTH, padding="causal")),
        Module(
            package,
            "ContextNetBlock",
            _made(f"{lobes}.ContextNet.ContextNetBlock", WIDTH, 3, 2, 4, [None, None, WIDTH], dropout=0.0),
            train=False,
            lens=REFLECTED,
        ),
    ]


def modules() -> list[Module]:
    """All of them."""
    return [*_of_espnet(), *_of_speechbrain()]
