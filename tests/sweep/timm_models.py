"""The smallest model of each of timm's families, with 64 by 64 pixels where it allows them, and some well-known ones."""

from __future__ import annotations

import warnings
from functools import partial

import timm

from tests.sweep.entry import Entry, images

_ANY_SIZE = """
    convmixer_1024_20_ks9_p14 convnext_atto cpubone_nano crossvit_tiny_240 cs3darknet_focus_s csatv2 cspnext_tiny
    davit_tiny densenet121 dla34 dpn48b eca_nfnet_l0 edgenext_xx_small efficientnet_lite0 efficientvim_m1
    efficientvit_b0 ese_vovnet19b_slim_dw fasternet_t0 fastvit_t8 focalnet_tiny_srf ghostnet_050
    hardcorenas_b hgnetv2_b0 hrnet_w18_small iformer_t inception_next_atto lcnetv2_small legacy_seresnet18
    legacy_xception lowformer_b0 mambaout_femto mobilenetv3_small_050 mobilenetv4_conv_small mobilenetv5_base
    mobileone_s0 mobilevit_xxs mvitv2_tiny naflexvit_base_patch16_parfac_gap nasnetalarge nextvit_small pnasnet5large
    poolformerv2_s12 pvt_v2_b0 rdnet_tiny regnetx_004_tv repghostnet_050 repvgg_a0 repvit_m0_9 res2next50 resnest14d
    resnet26d resnetv2_18 rexnet_150 sam2_hiera_tiny samvit_base_patch16_224 selecsls42 sequencer2d_s shvit_s1
    skresnet18 starnet_s050 swiftformer_s test_byobnet test_convnext test_efficientnet test_mambaout test_nfnet
    test_resnet test_vit tf_efficientnetv2_b0 tiny_vit_5m_224 tresnet_m twins_svt_small xception41p xcit_nano_12_p8_224
"""
"""Run at 64 by 64 as they are."""

_SIZED = """
    beit_base_patch16_224 cait_xxs24_224 coat_tiny convit_tiny deit_tiny_patch16_224 eca_botnext26ts_256
    efficientformerv2_s0 eva02_tiny_patch14_224 gcvit_xxtiny gmlp_ti16_224 hiera_tiny_224 levit_128s mixer_s16_224
    nest_tiny pit_ti_224 swin_tiny_patch4_window7_224 swinv2_cr_tiny_224 swinv2_tiny_window8_256 test_coatnet
    test_vit_relpos tnt_s_legacy_patch16_224 visformer_tiny vit_tiny_patch16_224 vit_tiny_r_s16_p8_224
    vitamin_small_224 volo_d1_224
"""
"""Are built for 64 by 64."""

_OTHER_PIXELS = {
    "efficientformer_l1": 224,
    "efficientvit_m0": 224,
    "inception_resnet_v2": 96,
    "inception_v3": 96,
    "inception_v4": 96,
}


def entries() -> list[Entry]:
    """One entry per model that the installed timm has; warns of others."""
    pixels = dict.fromkeys((_ANY_SIZE + _SIZED).split(), 64) | _OTHER_PIXELS
    missing = sorted(name for name in pixels if not timm.is_model(name))
    if missing:
        warnings.warn(f"timm {timm.__version__} has no {', '.join(missing)}", stacklevel=2)
    found = []
    for name, size in sorted(pixels.items()):
        if name in missing:
            continue
        options = {"img_size": size} if name in _SIZED.split() else {}
        make = partial(timm.create_model, name, pretrained=False, num_classes=10, **options)
        found.append(Entry("timm", name, make, partial(images, size)))
    return found
