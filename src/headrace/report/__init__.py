"""The report: tables and figures from result records only."""
