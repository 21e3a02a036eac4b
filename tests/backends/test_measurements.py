"""Which measured numbers hold for a GPU: the user's, those of its name, or scaled ones. No GPU is needed."""

import json

import pytest
import torch

from nt_attention.kernels import cost_model, measurements
from nt_attention.kernels.call import AttentionSpec
from nt_attention.kernels.cost_model import CallSize
from nt_attention.kernels.measurements import Card, tables_for
from nt_attention.kernels.select import explain_spec

H200 = Card(132, 1980.0, 4900, 1.0)

KEY = ("16-bit", "forward", "full")

SPEC = AttentionSpec(torch.device("cuda"), torch.bfloat16, 5, 5, 64, 64, 0.125)

SIZE = CallSize(7, 1009.0, 100_003, 300.0, 200.0)


def content(gpu, rows, card=H200, **more):
    costs = {"16-bit": {"forward": {"full": {"64": rows}}}}
    return {"gpu": gpu, "versions": {}, "card": card._asdict(), "costs": costs} | more


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    """The package has the files of two GPUs, and the cache of the user is empty."""
    monkeypatch.setenv("NT_ATTENTION_CACHE", str(tmp_path / "cache"))
    shipped = measurements._shipped

    def in_folder():
        with pytest.MonkeyPatch.context() as patch:  # other tables of the package are read as ever
            patch.setattr(measurements.resources, "files", lambda _: tmp_path)
            return shipped()

    monkeypatch.setattr(measurements, "_shipped", in_folder)
    (tmp_path / "measured").mkdir()
    slow = Card(20, 1000.0, 300, 0.25)
    for one in (
        content("NVIDIA H200", {"torch_flash": [1, 2, 3, 4, 5, 6]}),
        content("A Slow GPU", {"torch_flash": [9, 9, 9, 9, 9, 9]}, slow),
    ):
        (tmp_path / "measured" / f"{measurements.slug(one['gpu'])}.json").write_text(json.dumps(one))
    (tmp_path / "measured" / "trees_sm90.json").write_text("not read")
    tables_for.cache_clear()
    cost_model._find.cache_clear()
    yield tmp_path
    tables_for.cache_clear()
    cost_model._find.cache_clear()


@pytest.fixture
def save_of_user(folders):
    def save(gpu, text):
        file = measurements.user_file(gpu)
        assert file.is_relative_to(folders / "cache")
        file.parent.mkdir(parents=True)
        file.write_text(text if isinstance(text, str) else json.dumps(text))

    return save


@pytest.fixture
def card(monkeypatch, fake_gpu):
    """Sets the name of this machine's GPU, and what it reports."""

    def set_card(name, card):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: name)
        monkeypatch.setattr(Card, "of", lambda device: card)

    return set_card


def rows(tables):
    return [table.costs[KEY][64, 64]["torch_flash"] for table in tables]


def test_files_are_found_by_the_name_of_the_gpu():
    assert measurements.slug("NVIDIA H100 80GB HBM3") == "nvidia_h100_80gb_hbm3"
    table, other = tables_for("NVIDIA H200", H200)
    assert table.about == "measured on NVIDIA H200"
    assert "estimated for this GPU from A Slow GPU" in other.about
    assert rows([table]) == [(1, 2, 3, 4, 5, 6)]
    table, other = tables_for("A Slow GPU", H200)
    assert "estimated for this GPU from NVIDIA H200" in other.about
    assert rows([table, other]) == [(9, 9, 9, 9, 9, 9), (1, 2, 3, 4, 5, 6)]
    assert rows(tables_for(None, None)) == [(1, 2, 3, 4, 5, 6)]


def test_other_gpus_use_scaled_numbers_of_the_nearest():
    """Sequences and pairs scale with FLOPs, tokens with bandwidth, the longest query with one multiprocessor."""
    (table,) = tables_for("NVIDIA H199", Card(66, 990.0, 2450, 1.0))
    assert rows([table])[0] == pytest.approx((1, 2 * 4, 3 * 2, 4 * 4, 5 * 2, 6 * 4))
    assert table.about == "estimated for this GPU from NVIDIA H200, 0.50 × its bandwidth and 0.25 × its FLOPs"
    (table,) = tables_for("Another Slow GPU", Card(22, 1000.0, 300, 0.25))
    assert "from A Slow GPU, 1.00 × its bandwidth and 1.10 × its FLOPs" in table.about
    (table,) = tables_for("A GPU that reports nothing", Card(132, 0.0, 0, 1.0))
    assert rows([table]) == [(1, 2, 3, 4, 5, 6)]
    assert "which reports no clock or bandwidth" in table.about


def test_users_numbers_come_first(save_of_user):
    save_of_user("NVIDIA H200", content("NVIDIA H200", {"torch_flash": [6, 6, 6, 6, 6, 6]}))
    assert rows(tables_for("NVIDIA H200", H200))[:2] == [(6, 6, 6, 6, 6, 6), (1, 2, 3, 4, 5, 6)]
    assert tables_for("NVIDIA H200", H200)[0].about == "measured on this GPU"
    assert rows(tables_for("A Slow GPU", H200))[0] == (9, 9, 9, 9, 9, 9)


def test_a_gpu_that_nobody_measured_is_told_once(monkeypatch, save_of_user, recwarn):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    device = torch.device("cuda")
    for name, count in (("NVIDIA H200", 0), ("NVIDIA H199", 1), ("NVIDIA H199", 1)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        if not count:
            measurements.warn_if_estimated.cache_clear()
        measurements.warn_if_estimated(torch.device("cpu"))
        measurements.warn_if_estimated(device)
        assert len(recwarn) == count
        if not count:
            measurements.warn_if_estimated.cache_clear()
    assert "nobody has measured the backends on NVIDIA H199" in str(recwarn[0].message)
    measurements.warn_if_estimated.cache_clear()
    save_of_user("NVIDIA H199", content("NVIDIA H199", {}))
    measurements.warn_if_estimated(device)
    measurements.warn_if_estimated.cache_clear()
    assert len(recwarn) == 1


def test_other_versions_are_told(save_of_user, monkeypatch):
    save_of_user(
        "NVIDIA H200", content("NVIDIA H200", {}, versions={"torch": "2.13.0", "triton": "3.6.0", "gone": "1"})
    )
    monkeypatch.setattr(measurements, "versions", lambda: {"torch": "2.14.0", "triton": "3.6.0"})
    assert (
        tables_for("NVIDIA H200", H200)[0].about
        == "measured on this GPU with torch 2.13.0, now 2.14.0; gone 1, now none"
    )


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        '{"versions": {}, "costs": 3}',
        content("x", {"torch_flash": [1, 2, 3, 4, 5]}),
        content("x", {"torch_flash": [1, 2, 3, -4, 5, 6]}),
    ],
    ids=str,
)
def test_file_that_cannot_be_read_is_left_out_with_a_warning(save_of_user, text):
    save_of_user("NVIDIA H200", text)
    with pytest.warns(UserWarning, match=r"nvidia_h200.json is not read .* run python -m nt_attention tune again"):
        tables = tables_for("NVIDIA H200", H200)
    assert rows(tables)[0] == (1, 2, 3, 4, 5, 6)


def test_explain_says_where_expected_times_are_from(card, save_of_user, monkeypatch):
    monkeypatch.setattr(cost_model, "LEAST_US", {"forward": 0.0, "both": 0.0})

    def last_line(name, reported):
        card(name, reported)
        cost_model._find.cache_clear()
        tables_for.cache_clear()
        return str(explain_spec(SPEC, SIZE)).splitlines()[-1]

    assert last_line("NVIDIA H200", H200) == "  expected times: measured on NVIDIA H200"
    expected = "  expected times: estimated for this GPU from NVIDIA H200, 2.00 × its bandwidth and 1.00 × its FLOPs"
    assert last_line("NVIDIA H300", H200._replace(bandwidth=9800)) == expected
    save_of_user("NVIDIA H300", content("NVIDIA H300", {"torch_flash": [1000, 0, 0, 0, 0, 0]}))
    assert last_line("NVIDIA H300", H200) == "  expected times: measured on this GPU"
    assert cost_model.expected_us(SPEC, SIZE) == {"torch_flash": 1000}


def test_what_a_gpu_reports(monkeypatch):
    class Properties:
        major, minor, multi_processor_count = 9, 0, 132
        clock_rate, memory_clock_rate, memory_bus_width = 1_980_000, 3_201_000, 6144

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
    device = torch.device("cuda")
    assert Card.of(device) == Card(132, 1980.0, 4917, 1.0)
    Properties.major, Properties.minor = 8, 9
    assert Card.of(device).operations == 0.25
    del Properties.memory_bus_width
    assert Card.of(device).bandwidth == 0
