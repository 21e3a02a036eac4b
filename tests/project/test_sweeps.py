"""Which cases of sweeps are left out."""

import pytest
from sweeps import not_drawn


class Item:
    def __init__(self, nodeid, mark):
        self.nodeid, self.mark = nodeid, mark

    def get_closest_marker(self, name):
        return self.mark


def items(name, count, mark=None):
    return [Item(f"{name}[{i}]", mark) for i in range(count)]


@pytest.mark.parametrize(("least", "run"), [(False, {"some": 3, "all": 2, "few": 1}), (True, {"all": 1})])
def test_an_eighth_of_a_sweep_runs(least, run):
    sweep = pytest.mark.sweep.mark
    swept = {"some": items("some", 17, sweep), "all": items("all", 9, sweep), "few": items("few", 2, sweep)}
    kept = [*items("some", 2), *items("few", 1), *items("plain", 3)]
    left_out = not_drawn([*kept, *swept["some"], *swept["all"], *swept["few"]], least)
    assert not left_out & {*kept}
    assert {name: sum(item not in left_out for item in each) for name, each in swept.items()} == {
        name: run.get(name, 0) for name in swept
    }
