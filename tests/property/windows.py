"""Steps of a random model about windows: pooling, resampling and padding."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.property.steps import Draw, Sketch


def _pool(sketch: Sketch) -> None:
    """A window of the same size along each axis."""
    draw = sketch.draw
    x = _image(sketch)
    if x is None:
        return
    value = sketch.values[x]
    rank = value.dim() - 2
    kernel, stride = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    padding = draw(st.integers(0, kernel // 2))
    ceil = draw(st.booleans())
    size = draw(st.integers(1, 3))
    pools = [
        f"F.avg_pool{rank}d({x}, {kernel}, {stride}, {padding}, ceil_mode={ceil}, count_include_pad={draw(st.booleans())})"
    ]
    pools += [f"F.max_pool{rank}d({x}, {kernel}, {stride}, {padding}, {draw(st.integers(1, 2))}, ceil_mode={ceil})"]
    pools += [f"F.adaptive_avg_pool{rank}d({x}, {size})", f"F.adaptive_max_pool{rank}d({x}, {size})"]
    pools += [f"F.lp_pool{rank}d({x}.abs() + 0.1, 2, {kernel})"] if rank < 3 else []
    if rank > 1:
        pools += [f"F.max_pool{rank}d(torch.sigmoid({x}), {kernel}, {stride}, {padding})"]
        pools += [f"F.max_pool{rank}d(F.max_pool{rank}d({x}, {kernel}, {stride}, {padding}), 2, 1)"]
        pools += [
            f"F.avg_pool{rank}d(F.avg_pool{rank}d({x}, {kernel}), 2, 1)",
            f"F.avg_pool{rank}d({x}, {kernel}).mean((-1, -2))",
        ]
    if rank == 2:
        pools += [f"F.pixel_shuffle({x}, 2)", f"F.pixel_unshuffle({x}, 2)"]
    pools += [f"F.pad({x}, [1] * {2 * rank}, mode='{draw(st.sampled_from(['reflect', 'replicate', 'circular']))}')"]
    sketch.add(draw(st.sampled_from(pools)))


def _uneven_pool(sketch: Sketch) -> None:
    """A window with another size, step and border along each axis."""
    draw = sketch.draw
    x = _image(sketch)
    if x is None:
        return
    rank = sketch.values[x].dim() - 2
    kernel, stride, dilation = (_each(draw, rank, most) for most in (3, 3, 2))
    padding = tuple(draw(st.integers(0, size // 2)) for size in kernel)
    sizes = tuple(draw(st.sampled_from([None, 1, 2, 3, 5])) for _ in range(rank))
    divisor = f", divisor_override={draw(st.integers(1, 5))}" if rank > 1 and draw(st.booleans()) else ""
    ceil = draw(st.booleans())
    windows = f"{x}, {kernel}, {stride}, {padding}"
    pools = [
        f"F.avg_pool{rank}d({windows}, ceil_mode={ceil}{divisor})",
        f"F.max_pool{rank}d({windows}, {dilation}, ceil_mode={ceil})",
        f"F.adaptive_avg_pool{rank}d({x}, {sizes})" if rank > 1 else f"F.adaptive_avg_pool1d({x}, {sizes[0]})",
        f"F.adaptive_max_pool{rank}d({x}, {sizes})" if rank > 1 else f"F.adaptive_max_pool1d({x}, {sizes[0]})",
        f"F.unfold({x}, {kernel}, {dilation}, {padding}, {stride})"
        if rank == 2
        else f"{x}.unfold(-1, {kernel[0]}, {stride[0]})",
        f"F.max_pool{rank}d({windows}, {dilation}, ceil_mode={ceil}, return_indices=True)[0]",
    ]
    sketch.add(draw(st.sampled_from(pools)))


def _resample(sketch: Sketch) -> None:
    draw = sketch.draw
    x = _image(sketch)
    if x is None:
        return
    rank = sketch.values[x].dim() - 2
    linear = {1: ["linear"], 2: ["bilinear", "bilinear", "bicubic"], 3: ["trilinear"]}[rank]
    mode = draw(st.sampled_from(["nearest", "nearest", "nearest-exact", "area", *linear]))
    sizes = tuple(draw(st.integers(1, 7)) for _ in range(rank))
    size = draw(
        st.sampled_from(["scale_factor=2", "scale_factor=2", "scale_factor=0.5", "scale_factor=1.7", f"size={sizes}"])
    )
    corners = f", align_corners={draw(st.booleans())}" if mode in linear else ""
    smooth = ", antialias=True" if mode.startswith("bi") and draw(st.integers(0, 3)) == 0 else ""
    sketch.add(f"F.interpolate({x}, {size}, mode='{mode}'{corners}{smooth})")


def _pad(sketch: Sketch) -> None:
    """Borders of different widths, some of which cut."""
    draw = sketch.draw
    x = sketch.pick(lambda v: v.dim() > 0 and v.numel() > 0)
    if x is None:
        return
    shape = sketch.values[x].shape
    axes = draw(st.integers(1, min(len(shape), 3)))
    widths = [draw(st.sampled_from([0, 1, 2, 0, 1, 2, -1])) for _ in range(2 * axes)]
    mode = draw(st.sampled_from(["constant", "reflect", "replicate", "circular"]))
    if mode == "circular" and not all(map(_wraps, reversed(shape), widths[::2], widths[1::2])):
        return
    sketch.add(f"F.pad({x}, {widths}, mode='{mode}')")


def _wraps(size: int, left: int, right: int) -> bool:
    """Whether eager has as many elements as it repeats; it reads memory that nobody wrote where it has not."""
    return size + min(left, 0) + min(right, 0) >= max(left, right)


def _image(sketch: Sketch) -> str | None:
    """A value with one to three spatial axes."""
    return sketch.pick(lambda v: 3 <= v.dim() <= 5 and v.numel() > 0)


def _each(draw: Draw, rank: int, most: int) -> tuple[int, ...]:
    return tuple(draw(st.integers(1, most)) for _ in range(rank))


STEPS = (_pool, _uneven_pool, _resample, _pad)
