"""The course of one count through stages: what each made of it and why. The decision record shows it step by step."""

from collections.abc import Mapping, Sequence

from controlplane.core.policy import PolicyAnswer, PolicyInputs, Share, Step


class Course:
    """Begins at what a policy thinks is needed; lives for one decision. Counts are workers, STARTING + ACTIVE."""

    def __init__(self, inputs: PolicyInputs, needed: int, reason: str, message: str) -> None:
        self.inputs = inputs
        self.count = needed
        self.reason = reason
        self.message = message
        self.again: float | None = None
        self.steps: list[Step] = [Step("need", inputs.present, needed, message)]

    @property
    def grows(self) -> bool:
        return self.count > self.inputs.present

    @property
    def shrinks(self) -> bool:
        return self.count < self.inputs.present

    def take(self, stage: str, count: int, note: str, reason: str, again: float | None = None) -> None:
        """The stage's verdict. It gives the decision its reason when it turned its direction: up, down or hold."""
        before, after = self._direction(self.count), self._direction(count)
        self.steps.append(Step(stage, self.count, count, note))
        if count != self.count:
            self.message = f"{self.message}; {note}"
        if before != after:
            self.reason = reason
        if again is not None and again > self.inputs.now:
            self.again = again if self.again is None else min(self.again, again)
        self.count = count

    def _direction(self, count: int) -> int:
        return (count > self.inputs.present) - (count < self.inputs.present)

    def hold(self, stage: str, note: str, reason: str, again: float | None = None) -> None:
        """Back to the present count."""
        self.take(stage, self.inputs.present, note, reason, again)

    def passed(self, stage: str, note: str) -> None:
        """The stage looked and changed nothing."""
        self.steps.append(Step(stage, self.count, self.count, note))

    def answer(self, parts: Mapping[str, int] | None = None, shares: Sequence[Share] = ()) -> PolicyAnswer:
        steps = tuple(self.steps)
        return PolicyAnswer(self.count, self.reason, self.message, self.again, steps, parts or {}, tuple(shares))
