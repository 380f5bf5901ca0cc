"""The same claim with a run that is killed once, and one that fails."""

import dataclasses

from proof.claim import Variant

from support.proof import drawn

KILLER = {"class_path": "support.proof.killer.KillOnce", "init_args": {"step": 7, "flag": "${data}/killed"}}

CLAIM = dataclasses.replace(
    drawn.CLAIM,
    name="faulty",
    variants=(Variant("failing", ("--model.student=resnet9",)), Variant("killed", callbacks=(KILLER,))),
    seeds=(0,),
    preparations=(),
)
