"""The opening of a run: its first round, and its method set up for the plan."""

from fedloom.algorithm.method import Method
from fedloom.algorithm.records import Plan
from fedloom.common.errors import InvalidValue
from fedloom.common.round import Round
from fedloom.parts.course import Course, pipelines
from fedloom.parts.requirements import require_participation
from fedloom.rounds.checks import checked_model
from fedloom.rounds.evaluation import clients_without_steps, untrained
from fedloom.rounds.schedule import Schedule
from fedloom.state.pool_files import PoolFiles
from fedloom.task import Task


def opening(
    method: Method,
    task: Task,
    schedule: Schedule,
    trainers: int,
    pools: PoolFiles,
    remote: bool,
) -> tuple[Round, Course, list[str]]:
    """Set up the method of a run.

    Args:
        method: The whole method, with all stages.
        task: Data, model and local training. Clients from number `trainers` on never train.
        schedule: Rounds and participation.
        trainers: Number of clients that train.
        pools: Allocates matrices of models.
        remote: True if clients are real sites.

    Returns:
        The first round, before its selection; the pipelines, set up; and notices about layers and
        clients that are never trained.

    Raises:
        InvalidValue: If the schedule does not fit the method, the task or real sites.
    """
    if schedule.clock.runs and remote:
        reason = "real sites use real time: remove the table [clock]"
        raise InvalidValue(f"clock: {reason}")
    # Check the schedule of learning rates now: it may have no rate for the last round.
    task.training.same_rates(schedule.rounds, schedule.rounds)
    awaited = schedule.participants(trainers)  # largest number of replies of a round
    participants = schedule.clock.selected(awaited, trainers)
    poisson = schedule.participation_mode == "poisson"
    require_participation(method, poisson, participants > awaited)
    rate = task.training.rate(1, schedule.rounds)
    first = Round(
        number=1,
        rounds=schedule.rounds,
        seed=schedule.seed,
        clients=trainers,
        participants=participants,
        learning_rate=rate,
        initial_learning_rate=rate,
        poisson=poisson,
    )
    plan = Plan(
        layout=task.layout,
        initial=task.initial,
        clients=trainers,
        participants=participants,
        rounds=schedule.rounds,
        seed=schedule.seed,
        classes=task.dataset.classes,
        sizes=task.sizes,
        module=task.model,
        remote=remote,
        poisson=poisson,
        pools=pools,
        training=task.training,
        awaited=min(awaited, participants),
    )
    course = Course(method)
    course.setup(plan)
    pipeline = course.at(1)
    for part in pipeline.parts:
        part.require_resources()
    checked_model(pipeline, method, task.initial, "setup")
    notices = [*untrained(pipeline, list(pipelines(method))), *clients_without_steps(task)]
    return first, course, notices
