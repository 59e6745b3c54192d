"""Slow twin of the step rule (cluster/queue/step_rule.py), as its docstrings define it."""

from cluster.queue.step_rule import StepRule, View


def next_step(rule: StepRule, view: View) -> tuple[list[int], list[int], list[int]]:
    """Trained and replaced groups of the next step, and unfinished groups that it waits for.

    No group of the view may be overdue.
    """
    taken, replaced = oldest(view)
    unfinished = sorted(view.started.keys() - view.finished)
    if len(taken) < view.groups_per_step:
        return [], [], unfinished
    left = view.started.keys() - {*taken, *replaced}
    for start in () if rule.late else range(view.step + 1):
        due = {i for i in left if view.started[i] <= start}
        trained = len(due) - min(len(view.constant & due), view.most_replaced)
        if due and trained > view.groups_per_step * (start + rule.horizon - view.step):
            return [], [], [i for i in unfinished if view.started[i] <= start]
    return taken, replaced, []


def oldest(view: View) -> tuple[list[int], list[int]]:
    """Trained and replaced groups of a step of the oldest finished groups; maybe too few."""
    taken, replaced = list[int](), list[int]()
    for group_id in sorted(view.finished, key=lambda i: (view.started[i], i)):
        if len(taken) < view.groups_per_step:
            skipped = group_id in view.constant and len(replaced) < view.most_replaced
            (replaced if skipped else taken).append(group_id)
    return sorted(taken), sorted(replaced)
