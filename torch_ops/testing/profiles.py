"""Hypothesis profiles of the kit."""

from __future__ import annotations

from dataclasses import dataclass

from torch_ops.testing._hypothesis import HealthCheck, Phase, Verbosity, settings

# Kernels refuse examples, and those are drawn anew: the verdict says whether enough were accepted.
_SLOW = [HealthCheck.too_slow, HealthCheck.filter_too_much]
_LARGE = [*_SLOW, HealthCheck.data_too_large]


@dataclass(frozen=True)
class Profile:
    """How much to run.

    Attributes:
        name: The profile's name.
        settings: Hypothesis settings; there is never a deadline, since a first call compiles.
        budget: Largest number of elements of a drawn tensor.
    """

    name: str
    settings: settings
    budget: int

    def examples(self, cost: int) -> int:
        """Examples of one (op, backend, dtype), for an op whose examples cost this much."""
        return max(self.settings.max_examples // cost, 1)


def _settings(
    examples: int, *, derandomize: bool, phases: list[Phase], checks: list[HealthCheck]
) -> settings:
    storage = {"database": None} if derandomize else {}
    return settings(
        max_examples=examples,
        derandomize=derandomize,
        deadline=None,
        print_blob=True,
        verbosity=Verbosity.quiet,  # it would print between the lines of a report
        report_multiple_bugs=False,
        suppress_health_check=checks,
        phases=phases,
        **storage,  # type: ignore[arg-type]
    )


# Not Phase.explain: it runs failing examples again for notes that nobody would read.
_CI = [Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink]
_LONG = [*_CI, Phase.target]
PROFILES = {
    "dev": Profile("dev", _settings(25, derandomize=False, phases=_LONG, checks=_SLOW), 2**16),
    "torch_ops_ci": Profile(
        "torch_ops_ci", _settings(100, derandomize=True, phases=_CI, checks=_LARGE), 2**16
    ),
    "nightly": Profile(
        "nightly",
        _settings(2000, derandomize=False, phases=_LONG, checks=_LARGE),
        2**20,
    ),
    "soak": Profile(
        "soak",
        _settings(20000, derandomize=False, phases=_LONG, checks=_LARGE),
        2**20,
    ),
}
"""``torch_ops_ci`` carries a prefix because hypothesis loads a profile ``ci`` of its own."""


def profile_of(name: str) -> Profile:
    """Returns a profile by name.

    Raises:
        ValueError: There is none of this name.
    """
    if name not in PROFILES:
        msg = f"verify: profile: received {name!r}, accepted {sorted(PROFILES)}"
        raise ValueError(msg)
    return PROFILES[name]
