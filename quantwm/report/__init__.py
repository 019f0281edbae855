"""The paper's evidence on a world of our own: rollouts, tables, verdicts and an HTML report."""
