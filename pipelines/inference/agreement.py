"""Comparison of the processes that share the videos of `mmspeed sample`, before the first of them is made.

Each makes every n-th video. With other prompts they would leave some out and overwrite others; with other weights or settings the
videos of one command would come from different models.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from mmspeed.config.leaves import flat
from mmspeed.device import pick
from mmspeed.mesh import process_group
from mmspeed.models.text.encoders import text_identity
from mmspeed.pipelines.inference.prompts import VideoRequest
from mmspeed.pipelines.inference.text_to_video import SamplerChoice, TextToVideo
from mmspeed.pipelines.run.agreement import require_agreement, run_facts, tensor_facts


def sampling_facts(pipe: TextToVideo, requests: Sequence[VideoRequest], choice: SamplerChoice) -> dict[str, str]:
    """The facts that processes must share, by dotted key: the run's config, code, prompts, settings, checkpoint and all weights.

    All bytes of the model are hashed, by one core.
    """
    facts = run_facts(pipe.config, pipe.device) | {
        "checkpoint": json.dumps(pipe.checkpoint),
        "prompts": json.dumps(len(requests)),
        "codec": json.dumps(pipe.codec.fingerprint[:16]),
        "text encoder": json.dumps(text_identity(pipe.config.text)[:16]),
    }
    for number, request in enumerate(requests, 1):
        facts |= flat(asdict(request), f"prompt {number}")
    if pipe.other is not None:
        facts |= tensor_facts("other expert", pipe.other.model)
    return facts | flat(asdict(choice), "sampler") | tensor_facts("model", pipe.model)


def require_same_sampling(
    pipe: TextToVideo, requests: Sequence[VideoRequest], choice: SamplerChoice, processes: int
) -> None:
    """Raise UserError in every process where they differ; the message names processes, hosts and keys. A collective call.

    `processes`: how many share the videos; one has nothing to compare.
    """
    if processes == 1:
        return
    with process_group(pick("cpu")):
        require_agreement(
            sampling_facts(pipe, requests, choice),
            "give all of them the same command, run folder and software; while the run is training, name a step with --checkpoint",
        )
