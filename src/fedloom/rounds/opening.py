"""The plan of a run and its first round."""

from fedloom.errors import InvalidValue
from fedloom.method import Method
from fedloom.parts.requirements import require_participation
from fedloom.records import Plan
from fedloom.round import Round
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
) -> tuple[Round, Plan]:
    """Return the first round, before its selection, and the plan of a run.

    Args:
        method: The whole method, with all stages.
        task: Data, model and local training. Clients from number `trainers` on never train.
        schedule: Rounds and participation.
        trainers: Number of clients that train.
        pools: Allocates matrices of models.
        remote: True if clients are real sites.

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
    return first, plan
