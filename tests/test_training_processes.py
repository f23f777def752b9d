"""Training over several processes: killed ones, and two at a time."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = str(Path(__file__).with_name("training_pair.py"))


def run(*command: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    result = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]


def test_killed_run_ends_as_if_it_had_not_been(tmp_path):
    """Ten kills at random places, in the middle of a checkpoint too."""
    run(SCRIPT, str(tmp_path), "--kills", "10")
    whole, killed = (torch.load(tmp_path / name / "weights.pt", weights_only=True) for name in ("whole", "killed"))
    assert all(torch.equal(weight, killed[0][name]) for name, weight in whole[0].items())
    assert killed[1] == whole[1]  # each step's losses, learning rate and gradient norm


def test_two_processes_equal_one(tmp_path):
    """By torchrun, which accelerate launches GPUs with too: each takes one of the two sequences of each batch."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    run(SCRIPT, str(tmp_path / "one"))
    run("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", SCRIPT, str(tmp_path / "two"))
    (one, logs, processes), (two, other_logs, other_processes) = (
        torch.load(tmp_path / name / "run.pt", weights_only=True) for name in ("one", "two")
    )
    assert (processes, other_processes) == (1, 2)
    for name, weight in one.items():
        if not name.endswith("key.bias"):  # attention is the same for any: its gradient is a rounding error
            torch.testing.assert_close(two[name], weight, rtol=1e-4, atol=1e-5)
    for single, double in zip(logs[:3], other_logs[:3], strict=True):
        for name in ("loss", "cc_loss", "pl_loss", "grad_norm", "router_cv2", "router_entropy"):
            assert double[name] == pytest.approx(single[name], rel=1e-4)
