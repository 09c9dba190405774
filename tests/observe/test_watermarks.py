"""Watermark monitoring: when it checks, what it reports, and that it reports each finding once."""

from __future__ import annotations

from chronik.observe.watermarks import ALERT_INTERVAL_S, CALM_INTERVAL_S, WatermarkMonitor, WatermarkPosition


def at(end: int, watermark: int, partition: int = 0) -> WatermarkPosition:
    return WatermarkPosition("orders", partition, end, watermark)


def test_the_monitor_samples_a_cluster_without_lag_every_5_s() -> None:
    monitor = WatermarkMonitor()
    for second in range(0, 50, 5):
        assert monitor.sample([at(second, second)], second) == []
        assert monitor.interval_s == CALM_INTERVAL_S


def test_the_monitor_samples_a_lag_above_100_records_every_500_ms_until_it_is_0() -> None:
    monitor = WatermarkMonitor()
    monitor.sample([at(100, 0)], 0)
    assert monitor.interval_s == CALM_INTERVAL_S, "100 are not above 100"
    monitor.sample([at(301, 200)], 5)
    assert monitor.interval_s == ALERT_INTERVAL_S
    monitor.sample([at(302, 301)], 5.5)
    assert monitor.interval_s == ALERT_INTERVAL_S, "one record is left"
    monitor.sample([at(302, 302)], 6)
    assert monitor.interval_s == CALM_INTERVAL_S


def test_the_monitor_samples_a_small_lag_older_than_1_s_every_500_ms() -> None:
    monitor = WatermarkMonitor()
    monitor.sample([at(10, 9)], 0)
    monitor.sample([at(10, 9)], 5)
    assert monitor.interval_s == ALERT_INTERVAL_S
    assert monitor.age_s("orders", 0) == 5


def test_a_small_lag_has_age_0_while_the_watermark_advances() -> None:
    monitor = WatermarkMonitor()
    for second in range(0, 60, 5):
        monitor.sample([at(second * 100 + 5, second * 100)], second)
        assert monitor.interval_s == CALM_INTERVAL_S
        assert monitor.age_s("orders", 0) == 0


def test_one_lagging_partition_keeps_the_short_sampling_interval() -> None:
    monitor = WatermarkMonitor()
    monitor.sample([at(500, 0, 0), at(500, 500, 1)], 0)
    monitor.sample([at(500, 499, 0), at(900, 900, 1)], 0.5)
    assert monitor.interval_s == ALERT_INTERVAL_S
    monitor.sample([at(900, 900, 1)], 1)
    assert monitor.interval_s == CALM_INTERVAL_S, "it is led elsewhere now"


def test_the_monitor_reports_a_lag_above_10_once_until_it_returns_to_0() -> None:
    monitor = WatermarkMonitor()
    assert monitor.sample([at(10, 0)], 0) == []
    (told,) = monitor.sample([at(20, 0)], 5)
    assert (told.topic, told.partition, told.log_end_offset, told.high_watermark, told.lag) == ("orders", 0, 20, 0, 20)
    assert told.age_s == 5
    assert monitor.sample([at(5_000, 0)], 5.5) == []
    assert monitor.sample([at(5_000, 5_000)], 6) == []
    (again,) = monitor.sample([at(6_000, 5_000)], 11)
    assert (again.lag, again.age_s) == (1_000, 0)
