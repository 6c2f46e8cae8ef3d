"""The pipeline for answering a poll."""

from collections.abc import Mapping

from fedloom.algorithm import Algorithm
from fedloom.algorithm.records import Message
from fedloom.common.round import Round
from fedloom.local.cohort import Cohort
from fedloom.parts.hooks import Part
from fedloom.parts.pipeline import Pipeline


class PollAlgorithm(Algorithm):
    """Clients answer a part's poll with one number each. They receive the message for
    personalisation.
    """

    def __post_init__(self) -> None:
        """Skip the checks of fields, since users do not set them."""

    def bind(self, part: Part, inner: Pipeline) -> "PollAlgorithm":
        """Ask for `part`, which personalises through the pipeline `inner` inside it.

        Args:
            part: The part with the poll.
            inner: The pipeline of the algorithm and the parts inside `part`.

        Returns:
            This algorithm.
        """
        self.part = part
        self.inside = inner
        self.plan = inner.plan
        self.state = {}
        return self

    def deploy(self, round: Round, clients: tuple[int, ...]) -> Message:
        return self.inside.deploy(round, clients)

    def expects(self, round: Round) -> Mapping[str, tuple[int, ...]]:
        return {"loss": ()}

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        return self.part.answer(cohort, inbox, self.inside)


def poll_pipeline(pipeline: Pipeline, part: Part) -> Pipeline:
    """Return the pipeline for the poll of `part`.

    Args:
        pipeline: The pipeline of the round.
        part: A part of this pipeline.

    Returns:
        A pipeline without parts. Its clients reply with one number each.
    """
    return Pipeline(PollAlgorithm().bind(part, pipeline.inside(part)))
