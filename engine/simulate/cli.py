"""``uniagent simulate CONFIG --seed N [--faults PLAN] [--json]``: a config's run on a virtual clock.

Exit status 1 when an invariant did not hold; the last lines then name what broke and the command that replays it.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from uniagent.engine import config_file
from uniagent.engine.commands import Parser
from uniagent.engine.errors import UserError
from uniagent.engine.simulate import costs, faults, report
from uniagent.engine.simulate.scenario import from_config
from uniagent.engine.simulate.world import Hung, simulate


def main(argv: Sequence[str]) -> int:
    """Run the command; the result is the exit status."""
    parser = Parser("simulate", "Run a config on a virtual clock, with the real scheduler, router and session code.")
    parser.add_argument("config", nargs="?", metavar="CONFIG", help="a TOML file; its [simulate] section says the rest")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="the run is a function of it (default 0)")
    parser.add_argument("--faults", type=Path, metavar="PLAN", help="JSON list of what goes wrong, docs/simulation.md")
    parser.add_argument(
        "--calibrate", type=Path, metavar="RUN", help="print the costs of a real run's folder, and stop"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override a key; may be repeated"
    )
    parser.add_argument("--json", action="store_true", help="print the result as one line of JSON")
    args = parser.parse_args(argv)
    if args.calibrate:
        fitted, seen = costs.calibrate(args.calibrate)
        print(json.dumps(seen), file=sys.stderr)
        print(json.dumps(costs.as_json(fitted)))
        return 0
    if not args.config:
        raise UserError("CONFIG is missing: uniagent simulate run.toml --seed 0")
    plan = faults.read(args.faults) if args.faults else ()
    scenario = from_config(config_file.load(args.config, args.set), seed=args.seed, faults=plan)
    started = time.perf_counter()
    replay = shlex.join(["uniagent", "simulate", *argv])
    try:
        result = simulate(scenario)
    except Hung as hung:
        print(f"{hung}\nagain: {replay}", file=sys.stderr)
        return 1
    people = sys.stderr if args.json else sys.stdout
    print(report.table([result]), file=people)
    ages = ", ".join(f"{age}: {tokens}" for age, tokens in sorted(result.staleness.items()))
    print(
        f"{result.sessions} sessions in {time.perf_counter() - started:.1f} s; tokens by staleness {ages}; "
        f"{result.stale_tokens} stale tokens; {result.infra_failures} + {result.agent_failures} failures; "
        f"trace {result.trace}",
        file=people,
    )
    for problem in result.problems:
        print(f"broken: {problem}\nagain: {replay}", file=sys.stderr)
    if args.json:
        print(json.dumps(result.as_json()))
    return 1 if result.problems else 0
