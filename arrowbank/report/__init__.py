"""The stage `report`: one HTML page about a bank, whole in itself, for people who decide whether to train on it.

`subject` opens what was given, a module a kind of bank makes its sections, `plots` draws, `page` puts it together.
"""

from arrowbank.report.write import ReportConfig, write_report

__all__ = ["ReportConfig", "write_report"]
