"""Print a batch file that trains a config under Slurm.

rl launch --slurm configs/qwen_image_edit.jsonnet > edit.sbatch
rl launch --slurm --nodes 2 --pool-nodes 4 my.jsonnet seed=1 > my.sbatch
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from rl import printing
from rl.check import check_report
from rl.config.schema import ConfigError, load_config
from rl.printing import load_template


@printing.program
def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0; 1 if an option is invalid, or the config cannot run on these nodes."""
    parser = printing.Parser("rl launch", __doc__)
    add = parser.add_argument
    add("--slurm", action="store_true", required=True, help="print a batch file for sbatch")
    add("--nodes", type=int, default=0, help="nodes with ranks (world_size / GPUs, rounded up)")
    add("--gpus", type=int, default=8, help="GPUs per node, one rank on each (8)")
    add("--pool-nodes", type=int, default=0, help="additional nodes, for render workers only")
    add("--time", default="24:00:00", help="time limit of the job, in sbatch's format (24:00:00)")
    parser.add_config()
    args = parser.parse_intermixed_args(arguments)
    if min(args.gpus, args.nodes + 1) < 1 or args.pool_nodes < 0:
        raise ValueError("--gpus must be at least 1, --nodes and --pool-nodes at least 0")
    if not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", args.time):
        raise ValueError(f"--time {args.time!r}: write minutes, H:MM:SS or days-hours")
    config = load_config(args.config, args.overrides)
    nodes = args.nodes or -(-config.world_size // args.gpus)
    ranks = args.gpus if args.nodes else config.world_size // nodes
    if not args.nodes and config.world_size % nodes:
        raise ValueError(f"world_size: {nodes} nodes cannot share {config.world_size} ranks evenly")
    config = load_config(args.config, [*args.overrides, f"world_size={nodes * ranks}"])
    if problems := check_report.problems(config):
        raise ConfigError(problems)
    if args.pool_nodes and not config.pool:
        raise ValueError("--pool-nodes: render_pool.workers is 0, so the config has no pool")
    print(
        script(
            name=config.run_name,
            nodes=nodes,
            ranks=ranks,
            gpus=args.gpus if args.pool_nodes else ranks,
            pool_nodes=args.pool_nodes,
            time=args.time,
            arguments=shlex.join([args.config, *args.overrides]),
        )
    )
    return 0


def script(**values: object) -> str:
    """The batch file's text; `values`: the variables of `slurm.sh.j2`."""
    return load_template(Path(__file__).with_name("slurm.sh.j2")).render(values)


if __name__ == "__main__":
    sys.exit(main())
