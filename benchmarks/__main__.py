"""`python -m benchmarks NAME`: a table, then one JSON document as the last line."""

from __future__ import annotations

import argparse
import json
import sys

from benchmarks import codec, gpu_check
from quantwm.errors import UserError

REGISTRY = {"codec": codec, "gpu-check": gpu_check}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    names = parser.add_subparsers(dest="name", required=True)
    for name, module in REGISTRY.items():
        module.arguments(names.add_parser(name, help=module.__doc__.split("`: ")[1]))
    options = parser.parse_args()
    module = REGISTRY[options.name]
    try:
        result = module.run(options)
    except UserError as mistake:
        print(mistake, file=sys.stderr)
        return 2
    print(module.table(result))
    print(json.dumps(result))
    return 0 if result.get("ok", True) else 1


if __name__ == "__main__":
    sys.exit(main())
