"""The project's own callbacks: a package with the name of one of vlightning's."""

from vlightning.callbacks import OptimizerStepCallback


class CountSteps(OptimizerStepCallback):
    """Counts the steps that changed the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def on_optimizer_step(self, trainer, pl_module):
        self.steps += 1
