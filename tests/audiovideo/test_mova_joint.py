"""Towers, bridge and clock: against an independent float64 form of the equations, and against diffusers' Wan."""

from __future__ import annotations

import math

import mova_reference as reference
import mova_tiny as tiny
import pytest
import torch
from diffusers import WanTransformer3DModel
from torch.utils.flop_counter import FlopCounterMode

from fathom.audiovideo import PRESETS, Bridge, MovaConfig, branches
from fathom.audiovideo.bridge import BridgeBlock
from fathom.audiovideo.checkpoints import to_release
from fathom.audiovideo.cost import forward_flops
from fathom.audiovideo.joint import joint_forward, make_parts
from fathom.audiovideo.rotary import clock_table, frame_positions, grid_table, turn


def released(module) -> dict[str, torch.Tensor]:
    own = isinstance(module, Bridge)
    return {key if own else to_release(key): value.double() for key, value in module.state_dict().items()}


def expected(config, parts, given, **options):
    weights = [released(parts[name]) for name in ("video_dit", "audio_dit", "dual_tower_bridge")]
    return reference.joint(
        *weights, *(x.double() for x in given), patch=tuple(config.patch_size), head_dim=config.head_dim,
        freq_dim=config.freq_dim, out=config.video_channels, **options,
    )  # fmt: skip


def run(parts, given, scale=None):
    with torch.no_grad():
        return joint_forward(*(parts.get(n) for n in ("video_dit", "audio_dit", "dual_tower_bridge")), *given, scale)


def close(found, right, tolerance=1e-5):
    for a, b in zip(found, right, strict=True):
        assert (a - b).abs().max() <= tolerance * b.abs().max()


@pytest.mark.parametrize(
    ("options", "layers"),
    [
        ({}, (0, 1, 2)),
        ({"rotary": "first_frame", "strategy": "shallow_focus"}, (0,)),
        ({"rotary": "unaligned", "strategy": "distributed"}, (0,)),
        ({"rotary": "none", "strategy": "progressive", "directions": "v2a"}, (0, 1, 2)),
        ({"strategy": "custom", "layers": (1, 2), "directions": "a2v"}, (1, 2)),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_a_joint_forward_is_the_equations(options, layers):
    config, parts = tiny.parts(**options)
    given = tiny.inputs(config)
    said = {key: options[key] for key in ("rotary", "directions") if key in options}
    close(run(parts, given), expected(config, parts, given, layers=layers, **said))


def test_the_order_of_the_directions_does_not_matter_and_one_after_the_other_is_wrong():
    config, parts = tiny.parts()
    given = tiny.inputs(config)
    found, bridge = run(parts, given), parts["dual_tower_bridge"]
    wrong = expected(config, parts, given, layers=(0, 1, 2), sequential=True)
    assert (found[1] - wrong[1]).abs().max() > 1e-2 * wrong[1].abs().max()
    states = torch.randn(2, 36, config.video_width), torch.randn(2, 19, config.audio_width)
    tables = bridge.tables(3, 36, 19, torch.float32, torch.device("cpu"))
    with torch.no_grad():
        together = bridge(1, *states, tables, 3)
        audio = states[1] + bridge.video_to_audio_conditioners["1"](states[1], states[0], *tables[::-1], 3)
        video = states[0] + bridge.audio_to_video_conditioners["1"](states[0], states[1], *tables, 3)
    assert torch.equal(together[0], video) and torch.equal(together[1], audio)


def test_without_the_bridge_the_towers_run_alone():
    """Scale 0, no block, and no bridge at all: bit for bit what each tower says by itself."""
    config, parts = tiny.parts()
    video, audio, text, tau_v, tau_a = given = tiny.inputs(config)
    with torch.no_grad():
        alone = parts["video_dit"](video, tau_v, text), parts["audio_dit"](audio, tau_a, text)
    _, off = tiny.parts(directions="off")
    assert list(off) == ["video_dit", "video_dit_2", "audio_dit"]
    for found in (
        run(parts, given, torch.zeros(2)),
        run({**parts, "dual_tower_bridge": Bridge(4, 3, 64, 32, 16, directions="off")}, given),
        run({**parts, "dual_tower_bridge": None}, given),
    ):
        assert all(torch.equal(a, b) for a, b in zip(found, alone, strict=True))
    assert not torch.allclose(run(parts, given)[1], alone[1], rtol=0.1)
    half = run(parts, given, torch.tensor([1.0, 0.0]))  # of one clip alone
    both = run(parts, given)
    close((half[0][0], half[1][1]), (both[0][0], alone[1][1]), 1e-6)


def test_the_video_tower_is_diffusers_wan():
    config, parts = tiny.parts()
    tower = parts["video_dit"]
    own = {key: tower.config[key] for key in tower.config if not key.startswith("_")}
    stock = WanTransformer3DModel(**own, cross_attn_norm=True).eval()
    stock.load_state_dict(tower.state_dict(), strict=True)
    video, _, text, *_ = tiny.inputs(config)
    tau = torch.tensor([900.0, 17.5])
    with torch.no_grad():
        a, b = tower(video, tau, text), stock(video, tau, text).sample
    assert (a - b).abs().max() <= 1e-6 * b.abs().max()


@pytest.mark.parametrize("clips", [3])
def test_clips_of_a_batch_with_noise_levels_of_their_own_are_single_runs(clips):
    config, parts = tiny.parts(pooled_adaln=True)
    given = tiny.inputs(config, clips)
    together = run(parts, given)
    for row in range(clips):
        close((x[row] for x in together), (x[0] for x in run(parts, [x[row : row + 1] for x in given])))


def test_the_release_has_its_published_number_of_parameters():
    small, large = MovaConfig(preset="mova-360p"), MovaConfig(preset="mova-720p")
    assert {**large.to_dict(), "preset": small.preset, "height": 352, "width": 640} == small.to_dict()
    with torch.device("meta"):
        made = make_parts(small)
    counts = {name: sum(weight.numel() for weight in part.parameters()) for name, part in made.items()}
    assert counts == {
        "video_dit": 14_288_901_184, "video_dit_2": 14_288_901_184, "audio_dit": 1_419_193_472,
        "dual_tower_bridge": 2_659_737_600,
    }  # fmt: skip
    assert (small.tokens, large.tokens) == ((43_120, 403), (176_400, 403))


def test_presets_are_of_the_stated_sizes():
    for preset, millions in {"tiny": 0.52, "small": 21.9, "base": 376}.items():
        config = MovaConfig(preset=preset)
        with torch.device("meta"):
            made = make_parts(config)
        total = sum(weight.numel() for part in made.values() for weight in part.parameters())
        assert total / 1e6 == pytest.approx(millions, rel=0.005)
        assert config.video_layers > config.audio_layers and config.tokens == (208, 103)
    assert set(PRESETS) == {"tiny", "small", "base", "mova-360p", "mova-720p"}


def test_strategies_at_the_release_size():
    at = {name: MovaConfig(preset="mova-360p", mova={"strategy": name}).method.exchanges(30) for name in
          ("full", "shallow_focus", "distributed", "progressive", "custom")}  # fmt: skip
    assert at["full"] == tuple(range(30)) and at["shallow_focus"] == tuple(range(10))
    assert at["distributed"] == tuple(range(0, 30, 3))
    assert at["progressive"] == (0, 1, 2, 3, 4, 5, 6, 7, 8, 11, 14, 17, 20, 23, 26, 29)
    assert at["custom"] == (0, 2, 4, 6, 8, 12, 16, 20)


# The clock


def test_aligned_frames_have_the_phase_of_the_audio_at_their_time():
    """At 24 pictures per second s is no whole number; at 25 it is 8, and frame i has the row of audio latent 8 i."""
    for rate in (25.0, 24.0):
        s = 50 * 4 / rate
        frames = clock_table(frame_positions(9, "aligned", 4, rate, 50.0), 16, torch.float32)
        audio = clock_table(torch.arange(80).double(), 16, torch.float32)
        for i in range(9):
            there = clock_table(torch.tensor([s * i], dtype=torch.float64), 16, torch.float32)
            assert all(torch.equal(a[i], b[0]) for a, b in zip(frames, there, strict=True))
            if rate == 25:
                assert all(torch.equal(a[i], b[8 * i]) for a, b in zip(frames, audio, strict=True))


def test_scores_depend_on_the_difference_of_times_alone():
    q, k = torch.randn(1, 1, 1, 16).double(), torch.randn(1, 1, 1, 16).double()
    s, found = 50 / 6, {}
    for i in range(6):
        for j in (0.0, 3.0, 8.0):
            shifted = [
                clock_table(torch.tensor([p], dtype=torch.float64), 16, torch.float64) for p in (s * i, s * i - j)
            ]
            found.setdefault(j, []).append(float((turn(q, shifted[0]) * turn(k, shifted[1])).sum()))
    for scores in found.values():
        assert max(scores) - min(scores) < 1e-12
    assert abs(found[0.0][0] - found[8.0][0]) > 1e-3


def test_first_frame_positions_are_those_of_a_causal_codec():
    found = frame_positions(4, "first_frame", 4, 24.0, 50.0)
    torch.testing.assert_close(found, torch.tensor([0, 50 / 24, 50 / 24 + 200 / 24, 50 / 24 + 400 / 24]).double())


def test_all_tokens_of_a_frame_share_a_phase_and_the_two_forms_of_rotation_differ():
    _, parts = tiny.parts()
    of_video, _ = parts["dual_tower_bridge"].tables(3, 18, 19, torch.float32, torch.device("cpu"))
    cos = of_video[0].view(3, 6, -1)
    assert (cos == cos[:, :1]).all() and not torch.equal(cos[0], cos[1])
    x = torch.randn(1, 1, 5, 16)
    half = turn(x, clock_table(torch.arange(5).double(), 16, torch.float32))
    cos, sin = (table[:, :, 0] for table in grid_table(16, (5,), torch.float32, x.device))
    pairs = x.unflatten(-1, (-1, 2)).flip(-1) * torch.tensor([-1.0, 1.0])
    assert not torch.allclose(half, x * cos + pairs.flatten(-2) * sin, atol=0.1)


def test_the_clock_is_kept_in_fp32_and_in_fp64():
    bridge = tiny.parts()[1]["dual_tower_bridge"]
    for dtype, wide in (
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ):
        tables = bridge.tables(3, 18, 19, dtype, torch.device("cpu"))
        assert {x.dtype for table in tables for x in table} == {wide}


# What cannot be


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"audio_layers": 5}, "audio_layers=5: at most video_layers=4"),
        ({"head_dim": 15}, "head_dim=15: an even number of at least 6"),
        ({"preset": "tinny"}, "preset='tinny': must be one of 'tiny', "),
        (
            {"strategy": "shallow_focus", "audio_layers": 2},
            "strategy='shallow_focus': no layer of 2 exchanges; use 'full'",
        ),
        ({"rotary": "alligned"}, "mova option rotary='alligned': must be one of 'aligned'"),
        ({"phases": [{"shift": 3}]}, "each needs a `share` above 0, and may change video_shift"),
    ],
)
def test_a_model_that_cannot_be_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        tiny.config(**fields)


def test_sizes_that_do_not_fit_name_the_nearest_that_do():
    for fields, message in (
        ({"frames": 10}, "frames=10: must be 1 more than a multiple of 4; the nearest is 9"),
        ({"height": 40}, "height=40: must be a multiple of 16; the nearest is 32"),
        ({"width": 57}, "width=57: must be a multiple of 16; the nearest is 64"),
    ):
        with pytest.raises(ValueError, match=message):
            len(tiny.config(**fields).tokens)
    with pytest.raises(ValueError, match="audio_width=24: must be a multiple of head_dim=16"):
        Bridge(2, 2, 32, 24, 16)


# Cost


@pytest.mark.parametrize("options", [{}, {"strategy": "distributed", "directions": "v2a"}, {"directions": "off"}])
def test_the_closed_form_counts_what_torch_counts(options):
    config, _ = tiny.parts(**options)
    with torch.device("meta"):
        made = make_parts(config)
        given = [torch.empty_like(x, device="meta") for x in tiny.inputs(config, 1)]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        run(made, given)
    assert forward_flops(config) == counter.get_total_flops()


def test_a_layer_of_the_bridge_costs_what_the_paper_says():
    """2 · (4·L_v·D² …): products of queries and outputs, of keys and values, and of the attention."""
    config = MovaConfig(preset="mova-360p")
    (v, a), d, k = config.tokens, config.video_width, config.audio_width
    with_bridge, without = (
        forward_flops(config),
        forward_flops(MovaConfig(preset="mova-360p", mova={"directions": "off"})),
    )
    a_layer = 4 * v * d * d + 4 * a * k * d + 4 * v * a * d + 4 * a * k * k + 4 * v * d * k + 4 * a * v * k
    assert with_bridge - without == 30 * a_layer
    assert [len(branches(*scales)) for scales in ((1, 1), (5, 1), (5, 5), (5, 3.5))] == [1, 2, 2, 3]


def test_blocks_are_named_by_their_layer():
    bridge = tiny.parts(strategy="distributed", audio_layers=4)[1]["dual_tower_bridge"]
    assert list(bridge.audio_to_video_conditioners) == ["0", "3"]
    assert sum(isinstance(module, BridgeBlock) for module in bridge.modules()) == 4
    zero = tiny.config(bridge_init="zero_out")
    outputs = [b.inner.o.weight for b in make_parts(zero)["dual_tower_bridge"].modules() if isinstance(b, BridgeBlock)]
    assert outputs and all(not weight.any() for weight in outputs)
    assert math.isfinite(forward_flops(zero))
