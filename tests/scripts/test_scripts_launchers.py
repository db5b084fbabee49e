"""Batch files for Slurm start the right commands on the right nodes, and torchrun starts a run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_config
import tiny_loop
from tiny_pages import printed

from rl.check import check_report
from rl.config.schema import ConfigError, load_config
from rl.run.set_up import load_in_rank
from rl.tools.commands import launch

FAKES = {
    # Runs the command once for each task of the step, on the nodes after the first `--relative`.
    "srun": """
tasks=1 first=0 options=$*
while [[ $1 == -* ]]; do
    case $1 in --ntasks=*) tasks=${1#*=} ;; --relative=*) first=${1#*=} ;; esac
    shift
done
[[ $1 == getent ]] || echo "step $options"
for ((task = 0; task < tasks; task++)); do
    SLURM_PROCID=$task NODE=$((first + task)) "$@"
done""",
    "scontrol": 'printf "%s\\n" node0 node1 node2 node3',
    "getent": "echo 10.0.0.7 STREAM node0",
    "ray": 'echo "node $NODE: ray $*"',
    "rl": 'echo "node $NODE: rl $*"',
}
ARGUMENTS = "my.jsonnet 'run_name=a b'"


@pytest.mark.parametrize(
    ("nodes", "pool_nodes", "expected"),
    [
        (1, 0, ["node 0: rl train --nproc 8 my.jsonnet run_name=a b"]),
        (
            2,
            0,
            [
                f"node {n}: rl train --node-rank {n} --nproc 8 --nnodes 2 "
                "--rdzv-endpoint 10.0.0.7:20012 my.jsonnet run_name=a b"
                for n in range(2)
            ],
        ),
        (
            2,
            2,
            [
                "node 0: ray start --head --block --node-ip-address=10.0.0.7 --port=10012 "
                "--num-gpus=0 --include-dashboard=false",
                "node 1: ray start --block --address=10.0.0.7:10012 --num-gpus=0",
                "node 2: ray start --block --address=10.0.0.7:10012 --num-gpus=8",
                "node 3: ray start --block --address=10.0.0.7:10012 --num-gpus=8",
            ],
        ),
    ],
)
def test_a_batch_file_starts_the_right_commands_on_each_node(
    nodes: int, pool_nodes: int, expected: list[str], tmp_path: Path
) -> None:
    text = launch.script(
        name="edit", nodes=nodes, ranks=8, gpus=8, pool_nodes=pool_nodes, time="1:00:00",
        arguments=ARGUMENTS,
    )  # fmt: skip
    assert f"\n#SBATCH --nodes={nodes + pool_nodes}\n" in text
    (tmp_path / "bin").mkdir()
    for name, body in FAKES.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray/auth_token").write_text("secret")
    file = tmp_path / "edit.sbatch"
    file.write_text(text)
    assert subprocess.run(["bash", "-n", str(file)]).returncode == 0
    done = subprocess.run(
        ["bash", str(file)], capture_output=True, text=True, timeout=60,
        env={"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "HOME": str(tmp_path),
             "SLURM_JOB_ID": "12", "SLURM_CPUS_PER_TASK": "64", "SLURM_JOB_NODELIST": "node[0-3]"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.split("\n") if line.startswith("node ")]
    assert sorted(line for line in lines if pool_nodes == 0 or " ray start" in line) == expected
    assert sum(" rl train " in line for line in lines) == nodes


def test_the_kubernetes_file_starts_a_run_without_problems_and_its_judge(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text, judge = ((tiny_config.REPO / "scripts" / name).read_text("utf-8")
                   for name in ("kubernetes.yaml", "serve_judge.sh"))  # fmt: skip
    values = dict(re.findall(r'\{name: (APP__\w+), value: "?(.+?)"?\}', text))
    monkeypatch.setenv("VLLM_API_KEY", "0123456789")
    [(ranks, file, key)] = re.findall(
        r'command: \[rl, train, --nproc, "(\d+)", (.+)\]\n +args: \[(.+)\] #', text
    )
    config = load_config(file, [key], values)
    assert config.world_size == int(ranks) and check_report.problems(config, False) == []
    [(name, port)] = re.findall(r"kind: Service\n.+name: (.+)\}\n.+\n.+\n.+port: (\d+)", text)
    assert config.judge.api_base == f"http://{name}:{port}" and f"/dev/tcp/{name}/{port}" in text
    # For a service `judge` Kubernetes would set JUDGE_PORT, to another kind of value.
    assert f"JUDGE_PORT:-{port}" in judge and f"{name.upper().replace('-', '_')}_PORT" not in judge


@pytest.mark.slow
def test_the_command_prints_a_file_for_a_config_without_problems(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in tiny_config.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tiny_config.REPO)
    _, one_node, two_nodes = (
        line.split()[2:] for line in printed("docs/scale.md") if line.startswith("rl launch")
    )
    assert launch.main(one_node) == 0
    assert "\nsrun rl train --nproc 8 configs/qwen_image_edit.jsonnet" in capsys.readouterr().out
    assert launch.main(two_nodes) == 0
    assert "--nproc 8 --nnodes 2 --rdzv-endpoint" in capsys.readouterr().out
    assert launch.main([*one_node, "world_size=12"]) == 0
    text = capsys.readouterr().out
    assert "--nodes=2\n" in text and "--gpus-per-node=6\n" in text
    for wrong, why in (
        (["prompts_per_iteration=12"], "cannot be shared by 8 ranks"),
        (["--pool-nodes", "1"], "render_pool.workers is 0"),
        (["--gpus", "0"], "--gpus"),
        (["world_size=9"], "2 nodes cannot share 9 ranks"),
        (["--time", "1:00\nrm -rf /"], "--time"),
    ):
        assert launch.main([*one_node, *wrong]) == 1
        assert why in capsys.readouterr().err


def test_under_torchrun_a_config_gets_its_number_of_ranks_and_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = str(tiny_config.write(tmp_path, tiny_config.real(tmp_path)))
    assert load_in_rank(file, ()).world_size == 1
    torchrun = {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}
    for name, value in torchrun.items():
        monkeypatch.setenv(name, value)
    assert load_in_rank(file, ()).world_size == 4
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match="prompts_per_iteration"):
        load_in_rank(file, ())
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert load_in_rank(file, ()).world_size == 3  # waits until torchrun ends it


@pytest.mark.slow
def test_torchrun_starts_a_run_of_two_ranks(tmp_path: Path) -> None:
    [command] = [line for line in printed("docs/scale.md") if line.startswith("torchrun --nproc")]
    changes = (
        "num_iterations=1 prompts_per_iteration=2 optimizer.warmup_iterations=0 "
        f"evaluation.every_n_iterations=0 engine={{type:'transformers'}} base_exp_dir={tmp_path} "
        "tracking.page=false"
    )
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *command.split()[1:], *changes.split()],
        cwd=tiny_config.REPO, env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    run_dir = tmp_path / "with_torchrun"
    assert json.loads((run_dir / "config.json").read_text())["world_size"] == 2
    assert [row["iteration"] for row in tiny_loop.metrics_of(run_dir)] == [0, 1]
    ranks = {path.name.split(".")[1] for path in (run_dir / "episodes").glob("it_000001.*")}
    assert ranks == {"rank0", "rank1"}
