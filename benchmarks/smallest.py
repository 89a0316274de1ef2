"""The forty smallest networks of torchvision 0.28 and timm 1.0.31 by parameters: 0.3 to 2.1 million. On two CPU cores their first calls are quick."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.public import Network

_BY_SIZE: Mapping[tuple[str, int], str] = {
    ("timm", 160): """
        test_convnext test_efficientnet test_efficientnet_gn test_efficientnet_ln test_efficientnet_evos test_vit test_nfnet
        test_mambaout test_vit2 test_byobnet test_convnext3 test_resnet test_convnext2 test_coatnet test_vit_relpos test_vit3 test_vit4
        test_maxvit
    """,
    ("timm", 224): """
        starnet_s050 starnet_s100 dla46x_c dla46_c dla60x_c starnet_s150 mobilenetv3_small_050 lcnet_035 mobilenetv2_035 lcnet_050
        ese_vovnet19b_slim_dw mobilenetv4_conv_small_035 mobilenetv2_050 mnasnet_small mobilenetv3_small_075 tf_mobilenetv3_small_075
    """,
    ("timm", 256): """
        mobilevit_xxs edgenext_xx_small mobilevitv2_050
    """,
    ("torchvision", 224): """
        squeezenet1_1 squeezenet1_0 shufflenet_v2_x0_5
    """,
}
"""By package and the side of an image in pixels."""

SMALLEST = tuple(
    Network(name, package, name, (1, 3, side, side))
    for (package, side), names in _BY_SIZE.items()
    for name in names.split()
)
