"""How the marks of a clock become a run's sample, and samples the median that a rank tells."""

from dist_autotune.timing.samples import Reading, Samples


class ListClock:
    """A clock whose marks are read in the order they were made."""

    def __init__(self, *times_ms: float) -> None:
        self.times_ms = list(times_ms)
        self.events: list[str] = []

    def start(self) -> float:
        self.events.append("start")
        return self.times_ms.pop(0)

    def stop(self, mark: float) -> None:
        self.events.append("stop")

    def read_ms(self, mark: float) -> float:
        self.events.append("read")
        return mark


def run(samples: Samples, launches: int = 1) -> Reading:
    samples.begin_run()
    for _ in range(launches):
        samples.stop(samples.start())
    return samples.report_run("a", waits=True)


def sample(samples: Samples, launches: int = 1) -> Reading:
    report = run(samples, launches)
    samples.apply_outcome(waiting=False, counts=True)
    return report


def test_marks_are_read_at_the_end_of_the_run_only():
    clock = ListClock(1.0, 2.0)
    run(Samples(clock), launches=2)
    assert clock.events == ["start", "stop", "start", "stop", "read", "read"]


def test_what_is_told_is_the_median_of_the_samples_so_far():
    samples = Samples(ListClock(5.0, 1.0, 2.0))
    assert [sample(samples).ms for _ in range(3)] == [5.0, 3.0, 2.0]
