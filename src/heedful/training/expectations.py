"""Is my run right? What a recipe says of its own loss, compared with what the run finds."""

from collections.abc import Callable, Sequence

from heedful.config import Expectation
from heedful.training.events import Evaluated, Event


class Expectations:
    """A listener that says, at the steps that a recipe names, whether the loss is as it should be.

    The bands are of the recipe as it is shipped, with the data that it names; a run with other
    settings may rightly leave them.
    """

    def __init__(self, expected: Sequence[Expectation], say: Callable[[str], None]) -> None:
        self._by_step = {one.step: one for one in expected}
        self._say = say

    def on(self, event: Event) -> None:
        """Compare a held-out loss with its band."""
        if not isinstance(event, Evaluated) or event.step not in self._by_step:
            return
        one = self._by_step[event.step]
        band = f"{one.low:g} to {one.high:g}"
        if one.low <= event.loss <= one.high:
            self._say(f"is it right? step {event.step}: loss {event.loss:.3f} is within {band}")
        else:
            side = "below" if event.loss < one.low else "above"
            self._say(
                f"is it right? step {event.step}: loss {event.loss:.3f} is {side} {band}, where "
                "the recipe as shipped is; other data or settings may rightly be elsewhere, else "
                "`heedful verify` looks for what is wrong"
            )

    def close(self) -> None:
        """Nothing is held open."""
