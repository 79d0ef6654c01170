"""Estimated profiles."""

from __future__ import annotations

import io
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from helpers.torch_versions import widens_gradients
from spindle_cli.errors import InputError, UsageError, WorkloadError
from spindle_cli.profile import profiling
from spindle_cli.profile.profiling import Audience, estimate_profile
from spindle_cli.profile.types import Profile

TINY = str(Path(__file__).parent / "tiny_workload.py") + ":build"
NOBODY = Audience(Console(file=io.StringIO()), lambda _: None)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    out = tmp_path_factory.mktemp("estimate") / "profile.json"
    made = estimate_profile(TINY, out, NOBODY, device_name="a800-80gb", num_devices=8)
    assert Profile.read(out) == made
    return made


def test_every_valid_number_of_devices_has_an_estimated_point(tiny: Profile) -> None:
    assert [point.num_devices for point in tiny.by_name["classify/layers"].curve] == [1, 2, 4, 8]
    assert [point.num_devices for point in tiny.by_name["spread/loss"].curve] == [1]
    assert {point.source for metaop in tiny.metaops for point in metaop.curve} == {"estimated"}


def test_a_workload_of_more_ops_than_can_be_planned_for_is_refused_before_anything_is_timed(
    tiny: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = sum(metaop.num_ops for metaop in tiny.metaops)
    monkeypatch.setattr(profiling, "MAX_OPS", count)
    estimate_profile(TINY, tmp_path / "p.json", NOBODY, device_name="a800-80gb", num_devices=2)
    monkeypatch.setattr(profiling, "MAX_OPS", count - 1)
    with pytest.raises(
        WorkloadError, match=f"{count} operators of all tasks together; at most {count - 1} can"
    ):
        estimate_profile(TINY, tmp_path / "q.json", NOBODY, device_name="a800-80gb", num_devices=2)
    assert not (tmp_path / "q.json").exists()


def test_shares_are_known_of_no_more_cuts_than_a_cluster_may_have_devices(tmp_path: Path) -> None:
    """A batch of 2^17 samples for 2^13 devices could be cut into as many shares for micro-batches; a cluster
    has 2^16 devices at most, of which each then has two samples.
    """
    large, out = TINY.replace(":build", ":build_large"), tmp_path / "large.json"
    made = estimate_profile(large, out, NOBODY, device_name="a800-80gb", num_devices=2**13)
    assert made.by_name["classify/layers"].shares[0].samples == 2


def test_it_is_said_what_was_found_to_need_the_whole_batch_and_why(tmp_path: Path) -> None:
    said: list[str] = []
    audience = Audience(Console(file=io.StringIO()), said.append)
    for build in (":build", ":build_rooted"):  # the former lists its own
        source = TINY.replace(":build", build)
        estimate_profile(source, tmp_path / "p.json", audience, device_name="cpu", num_devices=2)
    (note,) = said
    assert note.startswith("classify/loss is never split over the batch: its loss is not the mean of")
    assert "'sqrt' is applied to what is made of all samples" in note and "tiny_workload.py:" in note


def test_sizes_are_those_of_the_model(tiny: Profile) -> None:
    layers = tiny.by_name["classify/layers"]
    assert layers.param_bytes_per_op == (8 * 8 + 8) * 4
    assert layers.extra_param_bytes == {3: (8 * 3 + 3) * 4}
    assert layers.flops_per_op == (4 * 2 * 16 * 8 * 8 + 2 * 16 * 8 * 3) / 4
    # 16 samples of 8 numbers, in bfloat16.
    assert layers.inner_output_bytes == 16 * 8 * 2
    assert layers.output_bytes == 0
    assert tiny.by_name["spread/layers"].output_bytes == 8 * 8 * 2
    assert tiny.optimizer_state_per_param == 2.0


@widens_gradients
def test_in_bf16_everything_has_half_the_bytes_and_masters_come_on_top(tiny: Profile, tmp_path: Path) -> None:
    source = tmp_path / "tiny.yaml"
    content = {"schema": "spindle.workload/1", "model": TINY, "train": {"precision": "bf16"}}
    source.write_text(yaml.safe_dump(content))
    made = estimate_profile(str(source), tmp_path / "tiny.json", NOBODY, device_name="cpu", num_devices=2)
    assert made.workload.fingerprint == tiny.workload.fingerprint
    layers, whole = made.by_name["classify/layers"], tiny.by_name["classify/layers"]
    assert layers.param_bytes_per_op == whole.param_bytes_per_op / 2
    # The estimate for an accelerator has bfloat16 activations in any case.
    assert layers.activation_bytes_per_op <= whole.activation_bytes_per_op
    assert layers.inner_output_bytes == whole.inner_output_bytes
    # Of each two bytes: four of the master, and eight of AdamW's moments.
    assert made.optimizer_state_per_param == 6.0


def test_float16_autocast_is_estimated_by_its_own_peak_and_noted_for_the_plan(tmp_path: Path) -> None:
    """A V100 has no bfloat16; its tensor cores make float16 eight times as fast as float32."""
    source = tmp_path / "tiny.yaml"
    content = {"schema": "spindle.workload/1", "model": TINY, "train": {"precision": "fp16-autocast"}}
    source.write_text(yaml.safe_dump(content))
    made = estimate_profile(
        str(source), tmp_path / "tiny.json", NOBODY, device_name="v100-32gb", num_devices=2
    )
    assert made.environment["precision"] == "float16"
    assert made.scales_losses and not made.clips_gradients
    assert made.optimizer_state_per_param == 2.0
    # Parameters and what is sent stay float32.
    assert made.by_name["classify/layers"].inner_output_bytes == 16 * 8 * 4
    content["train"] = {"precision": "bf16-autocast"}
    source.write_text(yaml.safe_dump(content))
    with pytest.raises(InputError) as caught:
        estimate_profile(str(source), tmp_path / "no.json", NOBODY, device_name="v100-32gb", num_devices=2)
    assert "'v100-32gb' has no bfloat16, only float16 and float32" in caught.value.message
    assert "train.precision: fp16-autocast" in str(caught.value.hint)


def test_the_optimizer_step_is_memory_traffic(tiny: Profile) -> None:
    # AdamW reads parameter, gradient and two moments, writes three of them, and the gradient is set to zero.
    assert tiny.optimizer_s_per_byte == pytest.approx(8 / (2.039e12 * 0.9))


def test_the_same_workload_gives_the_same_bytes(tiny: Profile, tmp_path: Path) -> None:
    again = estimate_profile(TINY, tmp_path / "again.json", NOBODY, device_name="a800-80gb", num_devices=8)
    assert again == tiny


def test_a_paper_size_workload_scales_less_than_its_devices_as_shares_get_small(tmp_path: Path) -> None:
    source = tmp_path / "clip.yaml"
    one_task = {"model": "spindle_cli.zoo.multitask_clip:build", "args": {"tasks": 1}}
    source.write_text(yaml.safe_dump({"schema": "spindle.workload/1", **one_task}))
    out = tmp_path / "clip.json"
    made = estimate_profile(str(source), out, NOBODY, device_name="a800-80gb", num_devices=64)
    for encoder in ("text", "audio"):
        curve = made.by_name[f"text_audio/{encoder}"].curve
        times = [point.op_s for point in curve]
        assert len(times) > 8
        assert all(later <= earlier for earlier, later in pairwise(times))
        # Device-seconds grow with the number of devices: small shares do not fill a device.
        spent = [point.op_s * point.num_devices for point in curve]
        assert all(later > earlier for earlier, later in pairwise(spent))


def test_what_is_not_known_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the device and how many"):
        estimate_profile(TINY, tmp_path / "p.json", NOBODY, device_name="h200")
    with pytest.raises(InputError, match="'gameboy'"):
        estimate_profile(TINY, tmp_path / "p.json", NOBODY, device_name="gameboy", num_devices=2)
    with pytest.raises(InputError, match="does not exist"):
        estimate_profile(TINY, tmp_path / "no" / "p.json", NOBODY, device_name="h200", num_devices=2)


def test_shares_are_those_of_the_curve_and_smaller_ones(tiny: Profile) -> None:
    """Of as many samples as the curve's devices have each, down to one; none where the batch stays whole."""
    for metaop in tiny.metaops:
        if metaop.coupled:
            assert metaop.shares == ()
            continue
        known = {(share.samples, share.tp): (share.forward_s, share.backward_s) for share in metaop.shares}
        for point in metaop.curve:
            assert known[metaop.batch_size // point.dp, point.tp] == (point.forward_s, point.backward_s)
        assert min(samples for samples, _ in known) == 1
        by_size = [sum(known[key]) for key in sorted(known) if key[1] == 1]
        assert by_size == sorted(by_size)
    assert any(metaop.coupled for metaop in tiny.metaops)
