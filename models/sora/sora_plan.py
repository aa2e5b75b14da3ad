"""Declare the plan of SoraDiT: the splits of its tokens, its attentions and layers with roles, and its regions."""

from __future__ import annotations

from collections.abc import Sequence

from mmspeed.protocols.plan import (
    Block,
    Chunked,
    Gather,
    Linear,
    ModelPlan,
    Region,
    Site,
    Split,
    Tokens,
)

VIDEO = Linear("column", "video", dim=2)
REGIONS = {
    "attention": Region(("self_attention",)),
    "cross_attention": Region(("cross_attention",)),
    "mlp": Region(("mlp",)),
    "norm": Region(("self_attention.qkv", "cross_attention.q", "mlp.up"), small=True),
    "activation": Region(("mlp.down",), small=True),
}


def sora_plan(kinds: Sequence[str], heads: int, control: bool = False) -> ModelPlan:
    """The plan of a model whose blocks attend by `kinds` ("spatial", "temporal" or "full"); `control`: it takes a control video."""
    factorised = "full" not in kinds
    tokens = {"x_BTSE": Tokens("video", dim=2, rows=1)} if factorised else {}
    embeddings = ("patch_in", "control_in") if control else ("patch_in",)
    own, text = Split("video", dim=1, rows=0, broadcast=True), Split("text", dim=1)
    return ModelPlan(
        blocks=tuple(
            Block(f"blocks.{place}", "rows" if kind == "temporal" else "columns", tokens)
            for place, kind in enumerate(kinds)
        ),
        carried=("x_BTSE",),
        before=(*embeddings, "text_norm", "text_in"),
        after=("final",),
        embeds=embeddings,
        inputs={
            **{name: {"input": Split("video", dim=2, rows=1)} for name in embeddings},
            "text_norm": {"input": text},
            "blocks.*": {
                "text_mask_BL": text,
                "frame_TS": own,
                "pos_T1X": Split("video", dim=1, rows=0, level="seen", broadcast=True, positions="rows"),
                "pos_1SX": Split("video", dim=1, rows=0, level="seen", broadcast=True, positions="columns"),
                "turn_2T1H": Split("video", dim=2, rows=1, level="seen", broadcast=True),
                "turn_21SH": Split("video", dim=2, rows=1, level="seen", broadcast=True),
                "mask_BTS": Split("video", dim=2, rows=1, level="seen"),
            },
            "final": {"frame_TS": own},
        },
        outputs={"final": {0: Gather("video", dim=2, rows=1)}},
        attention={
            "blocks.*.self_attention.attend": Site(("video",), calls=True, rows_layout="BNGAD"),
            "blocks.*.cross_attention.attend": Site(
                ("video",), ("text",), calls=True, sparse=False, rows_layout="BNAD"
            ),
        },
        linears={
            "blocks.*.self_attention.qkv": VIDEO,
            "blocks.*.self_attention.out": Linear("row", "video", dim=2),
            "blocks.*.cross_attention.q": VIDEO,
            "blocks.*.cross_attention.kv": Linear("column"),
            "blocks.*.cross_attention.out": Linear("row", "video", dim=2),
            "blocks.*.mlp.up": VIDEO,
            "blocks.*.mlp.down": Linear("row", "video", dim=2),
        },
        heads=heads,
        regions=REGIONS,
        chunks=(Chunked("mlp.up", "mlp.down"),),
        draws=False,
        image=("x_BCThw", 2),
        long_text="text",
    )
